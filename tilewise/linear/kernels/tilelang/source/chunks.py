"""What the kernels of linear attention share: features and decays of a chunk's rows, weights, states.

A sequence is cut into segments, which blocks work on side by side, and a segment into chunks, one after the other. A
state is kept as `depth` rows of `columns` numbers, and SIDE more: the first of them is z, the sum of features alone, as
if values had a column of ones. The gradient of a state is kept likewise.

Where z is needed only behind a segment it is spread over the rows of `lanes`: each thread adds up what it has in
registers, and asks no other before the end.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from tilewise.kernels.tilelang import ops
from tilewise.kernels.tilelang.source.tiles import Memory, array, rows_from

SIDE = 4  # numbers behind a row of a state, so that rows begin at multiples of 16 bytes
# Of a segment: its rows; where its state is; its sequence, and whether it is the first or the last of it.
BEGIN, END, SLOT, SEQUENCE, IS_FIRST, IS_LAST, FIELDS = range(7)


class Sizes:
    """The sizes of a call, which one kernel serves all of."""

    def __init__(self):
        for name in ("batch", "heads", "heads_k", "n", "n_rows", "n_segments", "slots", "n_states"):
            setattr(self, name, T.dynamic(name))


class Segment(NamedTuple):
    """Of a block."""

    begin: Any
    end: Any
    slot: Any
    sequence: Any
    is_first: Any
    is_last: Any

    @classmethod
    def of(cls, segments, number):
        return cls(*(segments[number, field] for field in range(FIELDS)))


def numbers(build, sizes, name, heads):
    """A parameter: one number a row, and some behind the last that are read and count for nothing."""
    return array(build, name, (sizes.batch, heads, sizes.n_rows), "float32")


def states_of(build, sizes, heads, slots):
    """A parameter: a state for each head of each slot."""
    return T.Tensor((slots, heads, build.depth, build.columns + SIDE), "float32")


def segments_of(sizes):
    return T.Tensor((sizes.n_segments, FIELDS), "int32")


def at(build, function, x):
    """The feature map, or its slope, of a number."""
    return ops.value(function, {"S": T.cast(x, "float32")}, (), ())


@T.macro
def map_rows(build, function, x_tile, f, weight, first, end):
    """Features of rows, each times its weight. 0 where there is no row, or no column."""
    rows, depth = f.shape
    for r, c in Memory.of(build).parallel(rows, depth):
        value = at(build, function, x_tile[r, c]) * weight(r)
        f[r, c] = T.if_then_else((first + r < end) & (c < build.d), value, 0)


@T.macro
def load_decays(build, decays, c_tile, b, hk, first, end):
    """The logs summed up from the chunk's first row to each, c; behind the last row they stay what they were."""
    if build.decays:
        load_row_numbers(build, decays, c_tile, b, hk, first, end)


class RowWeights(NamedTuple):
    """A chunk's, as load_weights has them; where nothing is normalized, rows have neither."""

    build: Any
    share_tile: Any
    e_tile: Any

    def share(self, r):
        return self.share_tile[r] if self.build.normalize else T.float32(1)

    def shift(self, r):
        return self.e_tile[r] if self.build.normalize else T.float32(0)


@T.macro
def load_weights(build, share, shift, weights, b, h, first, end):
    """Of rows: what their weights are multiplied by to be normalized, and the gradient of their sum, before that."""
    if build.normalize:
        load_row_numbers(build, share, weights.share_tile, b, h, first, end)
        load_row_numbers(build, shift, weights.e_tile, b, h, first, end)


@T.macro
def load_row_numbers(build, x, tile, b, h, first, end):
    """One a row. Behind the last row the copy engine finds what is there for it; else it is the last row's.

    That is a choice between two numbers, not between indices: of one number TileLang 0.1.15 would make an asynchronous
    copy, and then fail to say which copy is to be waited for.
    """
    if build.on_gpu and not build.packed:
        T.copy(x[b, h, first : first + tile.shape[0]], tile)
    else:
        for r in Memory.of(build).parallel(tile.shape[0]):
            tile[r] = T.if_then_else(first + r < end, x[b, h, first + r], x[b, h, end - 1])


def past(build, c_tile, r):
    """What is left of the state before a chunk, at a row of it."""
    return T.exp(c_tile[r]) if build.decays else T.float32(1)


def left(build, c_tile, r):
    """What is left of a row at its chunk's end."""
    return T.exp(c_tile[c_tile.shape[0] - 1] - c_tile[r]) if build.decays else T.float32(1)


def kept(build, c_tile):
    """What is left of the state before a chunk at its end."""
    return past(build, c_tile, c_tile.shape[0] - 1)


def within(build, c_tile, query, key):
    """What is left of a key at a query of the same chunk; 0 for later keys."""
    share = T.exp(T.min(c_tile[query] - c_tile[key], 0)) if build.decays else T.float32(1)
    return T.if_then_else(key <= query, share, T.float32(0))


@T.macro
def load_state(build, states, slot, h, state):
    """But for z."""
    for i, j in Memory.of(build).parallel(build.depth, build.columns):
        state[i, j] = states[slot, h, i, j]


@T.macro
def load_lanes(build, states, slot, h, lanes):
    for r, i in Memory.of(build).parallel(build.row_lanes, build.depth):
        lanes[r, i] = T.if_then_else(r == 0, states[slot, h, i, build.columns], 0)


@T.macro
def store_state(build, state, states, slot, h):
    """But for z."""
    for i, j in Memory.of(build).parallel(build.depth, build.columns):
        states[slot, h, i, j] = state[i, j]


@T.macro
def load_z(build, states, slot, h, z):
    for i in Memory.of(build).parallel(build.depth):
        z[i] = states[slot, h, i, build.columns]


@T.macro
def store_z(build, z, states, slot, h):
    for i in Memory.of(build).parallel(build.depth):
        states[slot, h, i, build.columns] = z[i]


@T.macro
def store_lanes(build, lanes, total, states, slot, h):
    """total: a fragment to compute in."""
    T.reduce_sum(lanes, total, dim=0)
    store_z(build, total, states, slot, h)


@T.macro
def add_to_z(build, f, total, z, c_tile):
    """Features of a chunk's rows, a fragment, are added up over all threads. total: a fragment to compute in."""
    T.reduce_sum(f, total, dim=0)
    for i in Memory.of(build).parallel(build.depth):
        z[i] = z[i] * kept(build, c_tile) + total[i]


@T.macro
def decay_all(build, state, c_tile):
    """What is left behind a chunk, of a state or of lanes."""
    if build.decays:
        rows, columns = state.shape
        for i, j in Memory.of(build).parallel(rows, columns):
            state[i, j] *= kept(build, c_tile)


@T.macro
def add_to_lanes(build, f, lanes):
    """Features of a chunk's rows, a fragment, are added up by each thread."""
    chunk, depth = f.shape
    folded = T.reshape(f, [chunk // build.row_lanes, build.row_lanes, depth])
    T.reduce_sum(folded, lanes, dim=0, clear=False)


@T.macro
def weigh_rows(build, f, narrow, weights, c_tile):
    """Features of queries as the gradient of the state before a chunk has them, in a tile for products."""
    chunk, depth = f.shape
    for r, c in Memory.of(build).parallel(chunk, depth):
        f[r, c] *= weights.share(r) * past(build, c_tile, r)
    T.copy(f, narrow)


@T.macro
def shift_rows(build, f, weights):
    """The same, as the gradient of z has them."""
    chunk, depth = f.shape
    for r, c in Memory.of(build).parallel(chunk, depth):
        f[r, c] *= weights.shift(r)


def one(r):
    """The weight of a row that has none."""
    return T.float32(1)


@T.macro
def store_rows(build, values, tile, x, b, h, first, end):
    """Rows of one head from `first` on, as far as there are any. tile: of the type of x, where the copy engine is used;
    one that is free."""
    if build.on_gpu and build.aligned and not build.packed and x.dtype == tile.dtype:
        T.copy(values, tile)
        T.copy(tile, rows_from(x, b, h, first, *values.shape))
    else:
        rows, columns = values.shape
        for r, c in Memory.of(build).parallel(rows, columns):
            if (first + r < end) & (c < x.shape[3]):
                x[b, h, first + r, c] = values[r, c]


def inverse(x):
    """1 / x; 0 of 0."""
    return T.Select(x == 0, T.float32(0), 1 / T.Select(x == 0, T.float32(1), x))
