"""A question as a call of the package: arrays where their layouts put them, texts as expressions, keys as a cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import tilewise as tw
from tests.fuzzing.question import Cache, Given, LinearQuestion, Question
from tests.fuzzing.running import device
from tests.fuzzing.running.memory import Memory
from tilewise import arrays, decoding, validate
from tilewise.contract import on_device
from tilewise.expr import Expr, Loaded, from_records, records
from tilewise.linear import LinearState
from tilewise.linear import validate as linear_validate
from tilewise.linear.spec import Problem
from tilewise.spec import Positions, Tile
from tilewise.validate import Call

MOST_SPARE_PAGES = 3


class Unaskable(ValueError):  # noqa: N818 - it names a state
    """The package refuses the call before any kernel sees it: at these sizes its integers would leave 32 bits."""


@dataclass(frozen=True, eq=False)
class Asked:
    """A call as kernels get it, on a device, and what its backward pass gets."""

    call: Call
    host: Call  # the same in main memory
    tile: Tile | None
    cache: Any = None
    d_out: Any = None
    d_lse: Any = None


def ask(question: Question, memory: Memory, on: str) -> Asked:
    """The call, its arrays in `memory`, or lying on a device as they lie there."""
    q, k, v = (memory.place(given) for given in (question.q, *_storable(question)))
    tile = None if question.tile is None else Tile(*question.tile)
    options = _options(question, memory)
    try:
        if question.cache is not None:
            return _asked_of_a_cache(question, q, k, v, options, tile, on)
        host = _call(question, q, k, v, options)
    except ValueError as error:
        if "beyond 32 bits" in str(error):
            raise Unaskable("integers beyond 32 bits") from None
        raise
    # What becomes of a result in a backward pass is known before it is computed.
    host = replace(host, spec=replace(host.spec, keeps_remainder=question.d_out is not None))
    pulled = (None if given is None else device.placed(memory.place(given), on)
              for given in (question.d_out, question.d_lse))  # fmt: skip
    return Asked(on_device(host, on, device.placed), host, tile, None, *pulled)


# -- what is asked ----------------------------------------------------------------------------------------------------


def _options(question: Question, memory: Memory) -> dict[str, Any]:
    loaded = [memory.place(given) for given in question.arrays]
    mask, score = (
        tw.parse(text, loaded) if text else None
        for text in (
            question.mask if question.mask_as_written is None else question.mask_as_written,
            question.score if question.score_as_written is None else question.score_as_written,
        )
    )
    wanted = {x.ctypes.data for x, given in zip(loaded, question.arrays, strict=True) if given.wants_gradient}
    return {
        "causal": question.causal,
        "mask": mask if question.array_as_mask is None else loaded[question.array_as_mask],
        "score": None if score is None else _wanting(score, wanted),
        "sinks": None if question.sinks is None else memory.place(question.sinks),
        "scale": question.scale,
        "batch_invariant": question.batch_invariant,
    }


def _wanting(score: Expr, wanted: set[int]) -> Expr:
    """The score, with these arrays' gradients wanted wherever it reads them, or a view of them."""

    def of(payload: Any) -> Any:
        if isinstance(payload, Loaded) and payload.array.ctypes.data in wanted:
            return replace(payload, grad=True)
        return payload

    return from_records((op, args, kind, of(payload)) for op, args, kind, payload in records(score))


def _call(question: Question, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Call:
    if question.lengths is not None:
        q, k, v = (x[0].swapaxes(0, 1) for x in (q, k, v))
        lengths = (np.array(x, np.int64 if question.threads % 2 else np.int32) for x in question.lengths)
        return validate.prepare_varlen(q, k, v, *lengths, **options)
    if question.origin != (0, 0) or question.total is not None:
        return _part(question, q, k, v, options)
    return validate.prepare(q, k, v, **options)


def _part(question: Question, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Call:
    """A call whose rows and keys are part of longer sequences, which kernels know and the public functions do not."""
    mask, score, causal = options.pop("mask"), options.pop("score"), options.pop("causal")
    if causal:
        mask = tw.causal() if mask is None else tw.causal() & mask
    call = validate.prepare(q, k, v, **options)
    mask, score = (None if x is None else check(x) for x, check in (
        (mask, validate.mask_expression), (score, validate.score_expression)))  # fmt: skip
    where = Positions(*question.origin, *(question.total or (None, None)))
    call = replace(call, spec=replace(call.spec, mask=mask, score=score, positions=where))
    validate.check_variant(call.spec, call.shape)
    return call


# -- decoding ---------------------------------------------------------------------------------------------------------


def _asked_of_a_cache(
    question: Question, q: Any, k: Any, v: Any, options: dict[str, Any], tile: Tile | None, on: str
) -> Asked:
    asked: Cache = question.cache  # type: ignore[assignment]
    made = cache_of(asked, k, v)
    host = decoding.prepare(q, made, **options)
    if on == "cpu":
        return Asked(host, host, tile, made)
    call = on_device(replace(host, k=q[:0], v=q[:0]), on, device.placed)  # outlines are nobody's to copy
    made = cache_of(asked, device.placed(k, on), device.placed(v, on))
    return Asked(replace(call, k=made.outline()[0], v=made.outline()[1]), host, tile, made)


def _storable(question: Question) -> Iterator[Given]:
    """k and v; of a cache in one piece, which is written in place, as a cache may lie."""
    for given in (question.k, question.v):
        if question.cache is not None and question.cache.page is None:
            whole = given.layout.padding // 16 * 16
            lies = replace(given.layout, reversed=(), expanded=(), padding=whole, writeable=True)
            given = replace(given, layout=lies)
        yield given


def cache_of(asked: Cache, k: Any, v: Any) -> Any:
    """A cache of these keys and values, each sequence as long as told; what lies beyond is NaN, pages are scattered."""
    if asked.page is None:
        return tw.KVCache(_spoilt(k, asked.lengths), _spoilt(v, asked.lengths), np.array(asked.lengths))
    batch, capacity = int(k.shape[0]), int(k.shape[2])
    pages = batch * -(-capacity // asked.page) + MOST_SPARE_PAGES
    stored = (_nan((pages, x.shape[1], asked.page, x.shape[3]), x) for x in (k, v))
    made = tw.PagedKVCache(*stored, batch, capacity)
    # Pages are taken and given back, so that no sequence has neighbours; then one after the other by turns.
    made.append(k[:, :, :1], v[:, :, :1])
    made.release(*range(0, batch, 2), *range(1, batch, 2))
    for x in (made.k, made.v):
        x[...] = _nan(x.shape, x)
    for first in range(0, max(asked.lengths, default=0), asked.page):
        counts = np.clip(np.array(asked.lengths) - first, 0, min(asked.page, capacity - first))
        made.append(k[:, :, first : first + asked.page], v[:, :, first : first + asked.page], counts)
    return made


def _spoilt(x: Any, lengths: tuple[int, ...]) -> Any:
    for b, n in enumerate(lengths):
        x[b, :, n:] = _nan(x[b, :, n:].shape, x)
    return x


def _nan(size: tuple[int, ...], like: Any) -> Any:
    if arrays.is_torch(like):
        return like.new_full(size, np.nan)
    return np.full((*size, like.itemsize), 0xFF, np.uint8).view(like.dtype)[..., 0]


# -- linear attention -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class AskedLinear:
    problem: Problem
    d_out: Any = None
    d_state: LinearState | None = None


def ask_linear(question: LinearQuestion, memory: Memory, on: str) -> AskedLinear:
    def place(given: Given | None) -> Any:
        return None if given is None else memory.place(given)

    def state(parts: tuple[Given, ...] | None) -> LinearState | None:
        return None if parts is None else LinearState(*map(place, parts))

    q, k, v, decay = map(place, (question.q, question.k, question.v, question.decay))
    if question.lengths is not None:
        q, k, v = (x[0].swapaxes(0, 1) for x in (q, k, v))
        decay = decay if decay is None or decay.ndim < 3 else decay[0].swapaxes(0, 1)
    problem = linear_validate.prepare(
        q, k, v, causal=question.causal, normalize=question.normalize, scale=question.scale,
        decay=float(decay) if decay is not None and decay.ndim == 0 else decay,
        feature_map=question.feature_as_written or tw.parse(question.feature),
        initial_state=state(question.state),
        lengths=None if question.lengths is None else np.array(question.lengths),
    ).problem  # fmt: skip
    d_out, d_state = place(question.d_out), state(question.d_state)
    if on == "cpu":
        return AskedLinear(problem, d_out, d_state)

    def there(x: Any) -> Any:
        return None if x is None else device.placed(x, on)

    moved = {name: there(getattr(problem, name)) for name in ("q", "k", "v", "decay")}
    initial = None if problem.initial is None else problem.initial.map(there)
    return AskedLinear(
        replace(problem, **moved, initial=initial), there(d_out), None if d_state is None else d_state.map(there)
    )
