"""Trying choices out on a GPU: which there are for a pass and a head, and how long each takes."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from triton.compiler import CompilationError
from triton.runtime.errors import OutOfResources

from tilewise import validate
from tilewise.kernels.triton import launch, tuning
from tilewise.kernels.triton.fitting import shared_memory
from tilewise.kernels.triton.tuning import Choice, Pass
from tilewise.spec import Partial, Tile
from tilewise.validate import Call

_logger = logging.getLogger("tilewise")

PASSES = (Pass.FORWARD, Pass.D_QUERY, Pass.D_KEYS)
_TOKENS, _NUMBERS, _LENGTH = 8192, 2048, 4096
_SIZES = ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (64, 32), (32, 64), (32, 128))
_WARPS, _STAGES = (4, 8), (2, 3, 4)
_ROUNDS, _LEAST_MS = 5, 2.0


def problems(d: int, device: str) -> list[Call]:
    """Full and causal attention of heads of this size, in bfloat16."""
    shape = (_TOKENS // _LENGTH, max(_NUMBERS // d, 1), _LENGTH, d)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(3))
    return [validate.prepare(q, k, v, causal=causal) for causal in (False, True)]


def candidates(kind: Pass, call: Call) -> Iterator[Choice]:
    """Those with room for them; large tiles for eight warps, small ones for four."""
    limit = shared_memory(call.shape.device)
    for q, k in _SIZES:
        for warps in _WARPS:
            for stages in _STAGES:
                choice = Choice(Tile(q, k), warps, stages)
                is_crowded = q * k * max(call.shape.d, 64) // warps > 128 * 128 * 64 // 4
                is_idle = q * k // warps < 32 * 64 // 4
                if not is_crowded and not is_idle and tuning.fits(kind, choice, call.spec, call.shape, limit):
                    yield choice


def milliseconds(kind: Pass, choice: Choice, calls: list[Call]) -> float:
    """The geometric mean over calls; infinite if Triton cannot compile the choice, or the GPU has no room for it."""
    try:
        with tuning.trying(kind, choice):
            return math.exp(statistics.fmean(math.log(_time(_run(kind, call))) for call in calls))
    except (OutOfResources, CompilationError, RuntimeError) as error:  # the last: what its passes raise
        _logger.info("%s, %s is left out: %s", kind.value, choice, error)
        return math.inf


def _run(kind: Pass, call: Call) -> Callable[[], Any]:
    spec, q, k, v = call.spec, call.q, call.k, call.v
    if kind is Pass.FORWARD:
        return lambda: launch.forward(spec, q, k, v, None)
    saved = launch.forward(spec, q, k, v, None)
    return lambda: launch.backward(spec, q, k, v, Partial(saved.out, saved.lse), q, None, None)


def _time(run: Callable[[], Any]) -> float:
    run()
    calls = max(1, math.ceil(_LEAST_MS / _once(run, 1)))
    return statistics.median(_once(run, calls) for _ in range(_ROUNDS))


def _once(run: Callable[[], Any], calls: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / calls


def default(kind: Pass, call: Call) -> Choice:
    """What is taken now."""
    return tuning.chosen(kind, call.spec, call.shape)
