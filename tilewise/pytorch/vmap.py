"""torch.vmap of the operators: examples join the batch where nothing tells them apart, else they go one by one."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tilewise import wire

_ARRAYS, _SINKS, _SPEC, _WANTED = 3, 4, 5, 10  # the places of what is no (batch, heads, n, ...) tensor


def register(library: Any, *operators: Any) -> None:
    for operator in operators:
        torch.library.register_vmap(operator.name(), partial(_vmap, operator), lib=library)


def _vmap(operator: Any, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    run = _joined if _can_join(in_dims, args) else one_by_one
    results = run(operator, info.batch_size, in_dims, args)
    return results, tuple([0] * len(x) if isinstance(x, list) else 0 for x in results)


def _can_join(in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> bool:
    """Whether each example is a batch of its own, and a batch's number is never looked at."""
    shared = [*in_dims[_ARRAYS], in_dims[_SINKS]]
    batched = [dim for i, dim in _batched(in_dims, args)]
    # The gradients of shared arrays are each example's own, and a joined call would add them up.
    sums = len(args) > _WANTED and (args[_SINKS] is not None or bool(args[_WANTED]))
    return all(dim is None for dim in shared) and None not in batched and not sums and wire.ignores_batch(args[_SPEC])


def _batched(in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> list[tuple[int, int | None]]:
    """The (batch, heads, n, ...) tensors among the arguments, by place, and their dimension of examples."""
    return [(i, in_dims[i]) for i, x in enumerate(args) if isinstance(x, torch.Tensor) and i != _SINKS]


def _joined(operator: Any, examples: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
    joined = list(args)
    for i, dim in _batched(in_dims, args):
        joined[i] = args[i].movedim(dim, 0).flatten(0, 1)
    batch = args[0].movedim(in_dims[0], 0).shape[1]
    return tuple(x if isinstance(x, list) else x.unflatten(0, (examples, batch)) for x in operator(*joined))


def one_by_one(operator: Any, examples: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
    if not examples:
        raise ValueError("vmap: expected at least one example to map attention over, got none")
    results = [operator(*_example(args, in_dims, i)) for i in range(examples)]
    return tuple(
        [torch.stack(list(each)) for each in zip(*parts, strict=True)]
        if isinstance(parts[0], list)
        else torch.stack(list(parts))
        for parts in zip(*results, strict=True)
    )


def _example(args: Any, in_dims: Any, i: int) -> list[Any]:
    return [
        _example(x, dim, i) if isinstance(x, list | tuple) else x if dim is None else x.select(dim, i)
        for x, dim in zip(args, in_dims, strict=True)
    ]
