"""A call's allocations and launches, in order, to be done again for other tensors that lie as these do.

Triton's own way to a launch reads every argument anew, which for small calls takes longer than the GPU does. What was
compiled for one call serves every other whose tensors have the same sizes, steps, types and alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from tilewise.kernels.triton import modules
from tilewise.pytorch import graphs

_OPTIONS = ("num_warps", "num_stages", "launch_pdl")


class _Launch(NamedTuple):
    run: Callable[..., Any]  # given a stream and the arguments
    args: list[Any]  # as they were: constants among them stay what they are
    places: list[tuple[int, int | tuple[int, ...]]]  # which of them are tensors, or tuples of tensors, of the tape


def _launcher(compiled: Any, grid: tuple[int, int]) -> Callable[..., Any]:
    """What Triton calls in the end, past its hooks: the grid, a stream, the function, what it is told of itself, three
    hooks' places and the arguments."""
    run, function, told = compiled.run, compiled.function, compiled.packed_metadata
    x, y = grid

    def launch(stream: int, *args: Any) -> None:
        run(x, y, 1, stream, function, told, None, None, None, *args)

    return launch


def _interpret(run: Callable[..., Any], options: dict[str, Any], stream: None, *args: Any) -> None:
    run(*args, **options)


class Tape:
    def __init__(self, *given: Any) -> None:
        self._tensors: list[Any] = list(given)  # by their numbers on the tape; forgotten by `finished`
        self._sizes: list[tuple[Any, ...]] = []
        self._launches: list[_Launch] = []
        self._results: list[int | None] = []
        self._tables: list[Any] = []  # tensors that are the same in every call; here they last as long as the tape
        self._interpreted = modules.is_interpreted()

    def empty(self, size: Sequence[int], dtype: Any, device: Any, steps: Sequence[int] | None = None) -> Any:
        """A tensor with nothing in it yet."""
        if steps is None:
            made = torch.empty(size, dtype=dtype, device=device)
        else:
            made = torch.empty_strided(size, steps, dtype=dtype, device=device)
        self._sizes.append((tuple(size), made.stride(), dtype, device))
        self._tensors.append(made)
        return made

    def launch(self, kernel: Any, grid: tuple[int, int], *args: Any, **named: Any) -> None:
        """`kernel[grid](*args, **named)`, kept to be done again."""
        if 0 in grid:
            return
        compiled = kernel[grid](*args, **named)
        options = {name: named.pop(name) for name in _OPTIONS if name in named}
        all_args = [*args, *(named[name] for name in kernel.arg_names[len(args) :])]
        if self._interpreted:
            run: Callable[..., Any] = partial(_interpret, kernel[grid], options)
        elif compiled is None:  # it was compiled for a GPU that is not here
            return
        else:
            run = _launcher(compiled, grid)
        places = [(i, place) for i, x in enumerate(all_args) if (place := self._place(x)) is not None]
        self._launches.append(_Launch(run, [self._constant(x) for x in all_args], places))

    def finished(self, *results: Any) -> Tape:
        """What `again` is to hand back. The tape then holds no tensors of the call, but tables."""
        self._results = [self._number(x) for x in results]
        self._tensors = []
        for launch in self._launches:
            for i, _ in launch.places:
                launch.args[i] = None
        return self

    def again(self, *given: Any) -> list[Any]:
        """The same for other tensors."""
        made = [torch.empty_strided(size, steps, dtype=type_, device=at) for size, steps, type_, at in self._sizes]
        tensors = [*given, *made]
        if self._interpreted:
            values, stream = tensors, None
        else:
            values = [None if x is None else x.data_ptr() for x in tensors]
            stream = torch.cuda.current_stream().cuda_stream
            if torch.cuda.is_current_stream_capturing():
                graphs.hold(self)  # its tables, and so they are there when the graph is replayed
        for run, args, places in self._launches:
            args = args.copy()
            for i, place in places:
                args[i] = values[place] if isinstance(place, int) else tuple(values[number] for number in place)
            run(stream, *args)
        return [None if number is None else tensors[number] for number in self._results]

    def _constant(self, x: Any) -> Any:
        """As launches take it: a table by its address."""
        if self._interpreted or not isinstance(x, torch.Tensor):
            return x
        if self._number(x) is None:
            self._tables.append(x)
        return x.data_ptr()

    def _place(self, x: Any) -> int | tuple[int, ...] | None:
        """Where tensors are on the tape; None of what stays as it is: numbers, and tables that the host made."""
        if not isinstance(x, tuple):
            return self._number(x)
        numbers = [self._number(part) for part in x]
        return tuple(number for number in numbers if number is not None) or None

    def _number(self, x: Any) -> int | None:
        return next((i for i, known in enumerate(self._tensors) if known is x and x is not None), None)
