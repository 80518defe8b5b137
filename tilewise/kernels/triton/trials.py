"""Trying choices out on a GPU: by which calls a pass is tuned, which choices there are, and how long each takes."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from triton.compiler import CompilationError
from triton.runtime.errors import OutOfResources

from tilewise import validate
from tilewise.cache import KVCache
from tilewise.kernels.triton import launch, launch_decode, tuning
from tilewise.kernels.triton.choices import Calls, Choice, Pass
from tilewise.spec import Attention, Shape, Tile
from tilewise.variants.alibi import alibi
from tilewise.variants.bias import bias
from tilewise.variants.causal import causal
from tilewise.variants.relative import relative

_logger = logging.getLogger("tilewise")

_TOKENS, _NUMBERS, _LENGTH = 8192, 2048, 4096
_SEQUENCES, _GROUP = 16, 4  # of decoding
_SIZES = ((128, 128), (128, 64), (64, 128), (64, 64), (32, 64), (64, 32), (32, 32))
_SIZES_OF_DECODING = ((64, 128), (64, 64), (32, 32), (32, 16))  # the first: rows at most
_WARPS, _STAGES = (4, 8), (1, 2, 3, 4)
_ROUNDS, _LEAST_MS = 5, 2.0


class Trial(NamedTuple):
    """A call of some kind in bfloat16, by which a pass is tuned."""

    kind: Pass
    calls: Calls
    spec: Attention
    shape: Shape
    run: Callable[[], Any]


def trials(kind: Pass, d: int, device: str) -> Iterator[Trial]:
    """A plain call and a causal one, with heads of this size; what reads arrays is never plain."""
    for calls in Calls:
        if kind is Pass.DECODE:
            yield _decoding(calls, d, device)
        elif calls is Calls.MASKED or kind not in (Pass.PAIRS, Pass.ARRAYS):
            yield _attention(kind, calls, d, device)


def _attention(kind: Pass, calls: Calls, d: int, device: str) -> Trial:
    """A backward pass is timed as a whole: nothing of it but the pass that is tuned changes."""
    rows = _TOKENS // _LENGTH, max(_NUMBERS // d, 1), _LENGTH, d
    q, k, v = (torch.randn(rows, dtype=torch.bfloat16, device=device) for _ in range(3))
    call = validate.prepare(q, k, v, causal=calls is Calls.MASKED, score=_score(kind, rows[1], device))
    spec = call.spec
    if kind is Pass.FORWARD:
        return Trial(kind, calls, spec, call.shape, lambda: launch.forward(spec, q, k, v, None))
    saved = launch.forward(spec.before_backward(call.shape.dtype), q, k, v, None)
    return Trial(kind, calls, spec, call.shape, lambda: launch.backward(spec, q, k, v, saved, q, None, None))


def _score(kind: Pass, heads: int, device: str) -> Any:
    """One that reads what the gradients of a pass are of."""
    if kind is Pass.PAIRS:
        return bias(torch.randn(_LENGTH, _LENGTH, device=device), grad=True)
    if kind is Pass.ARRAYS:
        slopes, table = torch.rand(heads, device=device), torch.randn(heads, 256, device=device)
        return alibi(slopes, grad=True) >> relative(table, grad=True)
    return None


def _decoding(calls: Calls, d: int, device: str) -> Trial:
    heads = max(_NUMBERS // d // _GROUP, 1)
    k, v = torch.randn((2, _SEQUENCES, heads, _LENGTH, d), dtype=torch.bfloat16, device=device)
    cache = KVCache(k, v, _LENGTH)
    q = torch.randn((_SEQUENCES, heads * _GROUP, 1, d), dtype=torch.bfloat16, device=device)
    spec = Attention(d**-0.5, causal() if calls is Calls.MASKED else None)
    shape = Shape.of(spec, q, *cache.outline())
    return Trial(Pass.DECODE, calls, spec, shape, lambda: launch_decode.decode(spec, q, cache, None))


def candidates(trial: Trial) -> Iterator[Choice]:
    """Those that a call would take as they are; large tiles for eight warps, small ones for four."""
    decodes = trial.kind is Pass.DECODE
    for q, k in _SIZES_OF_DECODING if decodes else _SIZES:
        for warps in _WARPS:
            is_crowded = q * k * max(trial.shape.d, 64) // warps > 128 * 128 * 64 // 4
            is_idle = q * k // warps < 32 * 32 // 4 or (decodes and warps > _WARPS[0])
            for stages in () if is_crowded or is_idle else _STAGES:
                choice = Choice(Tile(q, k), warps, stages)
                with tuning.trying(trial.kind, choice):
                    is_taken = taken(trial) == choice
                if is_taken:
                    yield choice


def milliseconds(trial: Trial, choice: Choice) -> float:
    """Infinite if Triton cannot compile the choice, or the GPU has no room for it."""
    try:
        with tuning.trying(trial.kind, choice):
            return _time(trial.run)
    except (OutOfResources, CompilationError, RuntimeError) as error:  # the last: what its passes raise
        _logger.info("%s, %s is left out: %s", trial.kind.value, choice, error)
        return math.inf


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


def taken(trial: Trial) -> Choice:
    """What is taken now."""
    return tuning.chosen(trial.kind, trial.spec, trial.shape)
