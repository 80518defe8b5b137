"""Gradients of the arrays that a score reads: which kernel sums up what, and what becomes of its sums."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.expr import Expr
from tilewise.kernels.triton import modules
from tilewise.kernels.triton.arguments import functions, kept_on, maps, planned, record_of, sizes, steps_of, tensor
from tilewise.kernels.triton.reads import Read, Sharing, distances_of_cells, reads
from tilewise.kernels.triton.source import gradients
from tilewise.kernels.triton.tuning import Choice, Pass, chosen, distances
from tilewise.spec import Attention, Shape, Tile
from tilewise.walking import loads


def of_arrays(
    spec: Attention, shape: Shape, tile: Tile | None, given: tuple[Any, ...], turned: dict[str, Any]
) -> tuple[Any, ...]:
    """The gradient of every array that wants one. given: q, k, v, d_out, lse, delta; turned: what turns q and k."""
    made: dict[int, Any] = {}
    for read in reads(spec):
        kind = Pass.PAIRS if read.sharing is Sharing.PAIRS else Pass.ARRAYS
        part = _Sum(spec, shape, chosen(kind, spec, shape, tile), given, turned, read).gradient()
        made[id(read.array)] = part if id(read.array) not in made else made[id(read.array)] + part
    return tuple(made[id(slot.array)].to(tensor(slot.array, "cpu").dtype) for slot in spec.wanted)


class _Sum:
    """The sums of one read, as a kernel makes them: (batch, heads, n), and then as the array has its axes."""

    def __init__(
        self, spec: Attention, shape: Shape, choice: Choice, given: tuple[Any, ...], turned: dict[str, Any], read: Read
    ) -> None:
        self.spec, self.shape, self.given, self.read = spec, shape, given, read
        self.tile, self.options = choice.tile, choice.options
        self.device = given[0].device
        variant = modules.variant(spec, {"part": read.slope})
        self.functions = functions(spec, variant, "score", "mask", "part") | turned
        self.steps = tuple(map(steps_of, given[:5]))

    def gradient(self) -> Any:
        if self.read.sharing is Sharing.PAIRS:
            return self._pairs()
        if self.read.sharing is Sharing.DISTANCES:
            return self._distances()
        return self._as_indexed((self._rows() if self.read.sharing is Sharing.ROWS else self._columns()).double())

    # -- kernels ------------------------------------------------------------------------------------------------------
    def _rows(self) -> Any:
        s = self.shape
        sums = self._zeros(s.n_q)
        grid, *rest = planned(self.spec, s, self.tile, self.given[0])
        if 0 not in grid:
            gradients.of_rows[grid](
                *self.given, sums, *self.steps, *rest, s.group, self.spec.scale,
                **self.functions, **self.options, **sizes(s, self.tile),
            )  # fmt: skip
        return sums

    def _columns(self) -> Any:
        s = self.shape
        sums = self._zeros(s.n_k)
        (tiles, _, batch), *rest = planned(self.spec, s, self.tile, self.given[0], by_key=True)
        if tiles and s.heads and batch:
            gradients.of_columns[(tiles, s.heads, batch)](
                *self.given, sums, *self.steps, steps_of(sums), *rest, s.group, self.spec.scale,
                **self.functions, **self.options, **sizes(s, self.tile),
            )  # fmt: skip
        return sums

    def _distances(self) -> Any:
        s = self.shape
        least, count = 1 - s.n_k, max(s.n_q + s.n_k - 1, 0)
        sums = self._zeros(count)
        grid = -(-count // distances()), s.heads, s.batch
        if 0 not in (*grid, s.n_q, s.n_k):
            record, loaded = record_of(self.spec, s, self.given[0])
            told = {name: x for name, x in sizes(s, self.tile).items() if not name.startswith("TILE")}
            gradients.of_distances[grid](
                *self.given, sums, *self.steps, steps_of(sums), record, loaded, s.group, self.spec.scale, least=least,
                count=count, **self.functions, **self.options, TILE=distances(), **told,
            )  # fmt: skip
        axis, index = next((i, x) for i, x in enumerate(self.read.node.args) if x.op not in ("const", "var"))
        return self._as_indexed(self._cells(sums, index, self.read.array.shape[axis], least), axis)

    def _cells(self, sums: Any, index: Expr, size: int, least: int) -> Any:
        """The sums of distances as those of the cells that they read: (batch, heads, size)."""
        s, count = self.shape, sums.shape[2]

        def make() -> tuple[Any, ...]:
            found = distances_of_cells(index, s, size, least, count)
            return tuple(torch.from_numpy(x).to(self.device) for x in found)

        order, begins = kept_on(self.device, ("cells", index.key, s, size), loads(index), make)
        cells = torch.zeros((s.batch, s.heads, size), dtype=torch.float64, device=self.device)
        grid = size, s.heads, s.batch
        if 0 not in grid:
            gradients.of_cells[grid](sums, cells, order, begins, steps_of(sums), steps_of(cells), AT_ONCE=256)
        return cells

    def _pairs(self) -> Any:
        s, tile = self.shape, self.tile
        shape = tuple(self.read.array.shape)
        outer = [i.payload if i.op == "var" else None for i in self.read.node.args[:-2]]
        kept = [(("B" in outer) and s.batch) or 1, (("H" in outer) and s.heads) or 1]
        grad = torch.zeros((*kept, s.n_q, s.n_k), dtype=torch.float32, device=self.device)
        key_tiles = -(-s.n_k // tile.k)
        grid = -(-s.n_q // tile.q) * key_tiles, kept[0] * kept[1]
        if 0 not in (*grid, s.batch, s.heads):
            record, loaded = record_of(self.spec, s, self.given[0])
            gradients.of_pairs[grid](
                *self.given, grad, *self.steps, steps_of(grad), record, loaded, s.group, self.spec.scale,
                key_tiles=key_tiles, kept_heads=kept[1], summed_batch=s.batch // kept[0],
                summed_heads=s.heads // kept[1], **self.functions, **self.options, **sizes(s, tile),
                **maps(self.spec, tile.q, q=self.given[0], d_out=self.given[3]),
                **maps(self.spec, tile.k, k=self.given[1], v=self.given[2]),
            )  # fmt: skip
        whole = torch.zeros(shape, dtype=torch.float32, device=self.device)
        order = [grad.shape[("B", "H").index(name)] if name else 1 for name in outer]
        rows, columns = slice(s.origin_q, s.origin_q + s.n_q), slice(s.origin_k, s.origin_k + s.n_k)
        whole[..., rows, columns] = grad.reshape(*order, s.n_q, s.n_k)
        return whole

    # -- axes ---------------------------------------------------------------------------------------------------------
    def _zeros(self, n: int) -> Any:
        return torch.zeros((self.shape.batch, self.shape.heads, n), dtype=torch.float32, device=self.device)

    def _as_indexed(self, sums: Any, computed: int | None = None) -> Any:
        """(batch, heads, n) as the array has its axes: summed over what none of them names.

        computed: the axis, if any, whose index is neither a variable nor a number. n are its cells.
        """
        s, args, shape = self.shape, self.read.node.args, tuple(self.read.array.shape)
        names = [i.payload if i.op == "var" else None for i in args]
        if self.spec.lengths is not None and "B" in names:
            sums = self._by_sequence(sums)
        whole = torch.zeros(shape, dtype=torch.float64, device=self.device)
        if computed is not None:
            names[computed] = "cell"
        if "HK" in names:
            sums = sums.unflatten(1, (s.heads_k, s.group)).sum(2)
        dims = {"B": 0, "H": 1, "HK": 1}
        place = {i: dims.get(name, 2) for i, name in enumerate(names) if name is not None}
        reduced = [d for d in range(3) if d not in place.values()]
        sums = sums.sum(reduced, keepdim=True) if reduced else sums
        view = sums.permute(*place.values(), *(d for d in range(3) if d not in place.values()))
        view = view.reshape([view.shape[i] for i in range(len(place))])
        at: list[Any] = []
        for i, name in enumerate(names):
            origin = {"Q": s.origin_q, "K": s.origin_k}.get(name or "", 0)
            at.append(slice(origin, origin + sums.shape[place[i]]) if name is not None else int(args[i].payload))
        whole[tuple(at)] = view
        return whole

    def _by_sequence(self, sums: Any) -> Any:
        """Of packed rows, (1, heads, total), to (sequences, heads, 1)."""
        lengths = self.spec.lengths
        assert lengths is not None
        parts = [sums[0, :, int(a) : int(b)].sum(-1) for a, b in zip(lengths.q[:-1], lengths.q[1:], strict=True)]
        return torch.stack(parts)[..., None] if parts else sums[:0, :, :1]
