"""What kernels share: where tiles are kept, how arrays come, records of tiles, scores of a tile."""

from functools import partial
from typing import Any, NamedTuple

import tilelang.language as T
from tvm.script.ir_builder.tirx import bind

from tilewise.kernels.tilelang import ops
from tilewise.walking import variables

MOST_ARRAYS = 8  # that a variant may read: a kernel has as many parameters for them
LOG2_E = 1.4426950408889634
LN_2 = 0.693147182464599609375  # in float32
LN_2_REST = -1.904654323148236e-9  # what it lacks
INFINITY = T.float32(float("inf"))

# Fields of a record, as in tables.py; runs of tiles are a list of visits here, each a tile and whether it is masked.
FIRST, Q_BEGIN, K_BEGIN, N_Q, N_K, FIRST_VISIT, N_VISITS, BATCH = range(8)
ORIGIN_Q, ORIGIN_K, TOTAL_Q, TOTAL_K, PACKED_Q, PACKED_K, FIELDS = range(8, 15)
FULL, PARTIAL = 0, 1

WARPGROUP = 128  # threads
REGISTERS_TO_LOAD, REGISTERS_OF_THREE = 24, 160  # of each thread
TURNS = 8  # the first of the barriers for turns; TileLang takes the lower ones for itself


class Memory(NamedTuple):
    """Where tiles are, and how loops over them run. In main memory there is one place for all, and one thread."""

    shared: Any
    fragment: Any
    parallel: Any

    @classmethod
    def of(cls, build):
        if build.on_gpu:
            return cls(T.alloc_shared, T.alloc_fragment, T.Parallel)
        return cls(T.alloc_local, T.alloc_local, _one_by_one)


def _one_by_one(*extents):
    return T.grid(*extents) if len(extents) > 1 else T.serial(*extents)


_SIZES = (
    "batch", "heads", "heads_k", "n_q", "n_k", "tiles", "n_visits", "n_rows",
    "n_sequences", "kept_batch", "kept_heads", "most_q", "most_k", "count",
)  # fmt: skip


class Sizes:
    """The sizes of a call. A kernel serves all, but for the order of its blocks."""

    def __init__(self):
        for name in _SIZES:
            setattr(self, name, T.dynamic(name))


def blocks(build, *pair):
    """Tiles and heads as blocks count them; and of what a block has in that order, its tile and its head."""
    return pair[::-1] if build.heads_first else pair


def array(build, name, shape, dtype):
    """A parameter. On a GPU its rows lie anywhere, the numbers of each side by side; elsewhere all are side by side."""
    if not build.on_gpu:
        return T.Tensor(shape, dtype)
    if build.packed and build.aligned and len(shape) == 4:
        _, heads, n, columns = shape
        return T.StridedTensor(shape, (n * heads * columns, columns, heads * columns, 1), dtype)
    steps = [T.dynamic(f"{name}_step{i}", "int64") for i in range(len(shape) - 1)]
    return T.StridedTensor(shape, (*steps, 1), dtype)


def loaded(build, i):
    """The parameter of a variant's i-th array. There is one for each that could be, of which nothing is read."""
    if i >= len(build.loaded):
        return T.Tensor((1,), "float32")
    dtype, rank = build.loaded[i]
    shape = tuple(T.dynamic(f"a{i}_size{axis}") for axis in range(rank))
    stored = "uint8" if dtype == "bool" else dtype
    if not build.on_gpu:
        return T.Tensor(shape, stored)
    return T.StridedTensor(shape, tuple(T.dynamic(f"a{i}_step{axis}", "int64") for axis in range(rank)), stored)


def after_kernels_before(build):
    """TileLang launches a kernel before the one ahead of it has ended; what that writes is there from here on."""
    if build.target.startswith("sm_9"):
        T.evaluate(T.pdl_sync())


def multiply(build, a, b, acc, **how):
    """A product of tiles that is begun, and not waited for."""
    return (T.wgmma_gemm if build.on_gpu else T.gemm)(a, b, acc, **how)


@T.macro
def wait(build, later):
    """Until all products are done but the `later` last."""
    if build.on_gpu:
        T.wait_wgmma(later)


@T.macro
def done_with(build, tile):
    """A tile that products were waited for is free for the next.

    TileLang lets the threads that load have a tile back behind its last use, and takes the begin of a product for it.
    So the tile is used here once more, for nothing.
    """
    if build.on_gpu:
        T.call_extern("handle", "static_cast<void>", T.access_ptr(tile[0, 0], "r"))


@T.macro
def share_registers(build):
    """Three warpgroups that compute have fewer each than TileLang gives to two."""
    if build.on_gpu and build.threads > 2 * WARPGROUP:
        T.annotate_producer_reg_dealloc(REGISTERS_TO_LOAD)
        T.annotate_consumer_reg_alloc(REGISTERS_OF_THREE)


@T.macro
def begin_turn(build, i):
    """Warpgroups begin their products in turns, if the build has it so.

    Those that begin together end together, and tensor cores have nothing to do while all compute weights.
    """
    if build.turns:  # noqa: SIM102, as the kernel has the second alone
        if (i > 0) | (T.get_thread_binding() >= WARPGROUP):  # nobody is before the first
            T.call_extern("handle", "tl::__sync_thread_partial", _turn_of(build, 0), 2 * WARPGROUP)


@T.macro
def end_turn(build):
    if build.turns:
        T.call_extern("handle", "tl::__named_barrier_arrive", _turn_of(build, 1), 2 * WARPGROUP)


def _turn_of(build, later):
    """The barrier at which this warpgroup, or the one so much later, waits for its turn."""
    return TURNS + (T.get_thread_binding() // WARPGROUP + later) % (build.threads // WARPGROUP)


def any_of_warp(build, flag):
    """Whether a flag is set for a thread of the warp: a branch that all of it take."""
    return T.any_sync(flag) if build.on_gpu else flag


def by_lanes(build, s):
    """A tile of scores, with the columns that lie in the same place of each 8: a thread has some of those to itself."""
    rows, columns = s.shape
    return T.reshape(s, [rows, columns // lanes(build), lanes(build)])


def lanes(build):
    return 8 if build.on_gpu else 1


@T.macro
def load_rows(build, x, tile, b, h, begin, first, n):
    """Rows of one head from `first` on. Those behind the last are 0, also where another sequence's lie there: what is
    multiplied by a weight of 0 must be a number."""
    rows, columns = tile.shape
    if build.packed or not build.aligned:
        for r, c in Memory.of(build).parallel(rows, columns):
            is_there = (0 <= first + r) & (first + r < n) & (c < x.shape[3])
            tile[r, c] = T.if_then_else(is_there, x[b, h, begin + first + r, c], 0)
    else:
        T.copy(rows_from(x, b, h, begin + first, rows, columns), tile)


@T.macro
def load_numbers(build, x, numbers, b, h, begin, first, n):
    """Numbers of rows, one each, as load_rows has the rows."""
    if build.packed or not build.on_gpu:
        for r in Memory.of(build).parallel(numbers.shape[0]):
            numbers[r] = T.if_then_else(first + r < n, x[b, h, begin + first + r], 0)
    else:
        T.copy(x[b, h, first : first + numbers.shape[0]], numbers)


@T.macro
def store_rows(build, values, x, b, h, begin, first, n):
    """Rows of one head from `first` on, as far as there are any."""
    rows, columns = values.shape
    if build.on_gpu and build.aligned and not build.packed:
        tile = T.alloc_shared((rows, columns), x.dtype)
        T.copy(values, tile)
        T.copy(tile, rows_from(x, b, h, begin + first, rows, columns))
    else:
        for r, c in Memory.of(build).parallel(rows, columns):
            if (first + r < n) & (c < x.shape[3]):
                x[b, h, begin + first + r, c] = values[r, c]


def rows_from(x, b, h, first, rows, columns):
    """Some rows of one head."""
    return x[b, h, first : first + rows, 0:columns]


class Place(NamedTuple):
    """What a variant's functions are computed with: the variables that they use, as far as a tile knows; arrays."""

    variables: dict  # Q, K, QP and KP are those of the sequence's first query and key
    build: Any
    variant: Any
    arrays: tuple

    @classmethod
    def of(cls, build, variant, record, b, h, hk, arrays):
        known = {
            "B": lambda: record(BATCH) + b, "H": lambda: h, "HK": lambda: hk,
            "NQ": lambda: record(TOTAL_Q), "NK": lambda: record(TOTAL_K),
            "Q": lambda: record(ORIGIN_Q), "K": lambda: record(ORIGIN_K),
            "QP": lambda: record(PACKED_Q), "KP": lambda: record(PACKED_K),
        }  # fmt: skip
        if build.from_zero:
            known |= dict.fromkeys(("Q", "K", "QP", "KP"), lambda: T.int32(0))
        used = frozenset().union(*map(variables, variant.expressions.values())) - {"S"}
        return cls({name: bind(known[name]()) for name in sorted(used)}, build, variant, arrays[: len(build.loaded)])

    def at(self, name, s, query, key):
        """A function of the variant, for one score. query, key: within the sequence."""
        moved = {"Q": query, "QP": query, "K": key, "KP": key}
        at_score = {name: x + moved[name] if name in moved else x for name, x in self.variables.items()}
        return ops.value(self.variant.expressions[name], {**at_score, "S": s}, self.variant.slots, self.arrays)

    def score(self, product, scale, query, key):
        """A product of q and k as a score."""
        s = product if self.build.raw else product * scale
        return self.at("score", s, query, key) if "score" in self.variant.expressions else s

    def times(self, name, d_score, s, query, key):
        """d_score times a derivative of the score; a key of weight 0 passes nothing on, whatever its slope."""
        if name not in self.variant.expressions:
            return d_score
        return T.Select(d_score == 0, T.float32(0), d_score * self.at(name, s, query, key))

    def counts(self, query, key, n_q, n_k):
        """Whether a key counts for a query."""
        inside = (query < n_q) & (key < n_k)
        return inside & self.at("mask", None, query, key) if "mask" in self.variant.expressions else inside


def records_of(build, n):
    """The parameter that has them: those of several batch indices or heads may be the same."""
    shape = (n.batch, n.heads, n.tiles, FIELDS)
    if not build.on_gpu:
        return T.Tensor(shape, "int32")
    steps = T.dynamic("records_step0", "int64"), T.dynamic("records_step1", "int64")
    return T.StridedTensor(shape, (*steps, FIELDS, 1), "int32")


def record_of(records, b, h, number):
    """A tile's record: its fields by name."""
    return partial(_field, records, b, h, number)


def _field(records, b, h, number, field):
    return records[b, h, number, field]


def finite(row_max):
    """The shift of the exponent; 0 for a row that has no key yet.

    row_max is kept as an exponent of 2. A product in its place would be fused with what is added to it, on a GPU: the
    same row_max would be another number in rescale than in p.
    """
    return T.Select(row_max == -INFINITY, T.float32(0), row_max)


def fused(build, x, y, z):
    """x * y + z, on a GPU rounded once."""
    return T.fma(x, y, z) if build.on_gpu else x * y + z


def lse_of(build, row_max, row_sum):
    """log(row_sum * 2^row_max). ln 2 has a second part, since row_max may be large."""
    shift = finite(row_max)
    done = fused(build, shift, T.float32(LN_2), shift * T.float32(LN_2_REST) + T.log(row_sum))
    return T.Select(row_sum == 0, -INFINITY, done)


def with_sink(lse, sink):
    """log(exp(lse) + exp(sink))"""
    larger = T.max(lse, sink)
    joint = larger + T.log(T.exp(lse - finite(larger)) + T.exp(sink - finite(larger)))
    return T.Select(larger == -INFINITY, larger, joint)


def weight_of(build, row_sum, row_max, largest, factor):
    """What acc is multiplied by: 1 / row_sum, with the weight of the largest score as it was multiplied.

    It is 1, unless scores are so large that row_max was rounded by much. Of a row whose weight is all on one key the
    result is that key's v, to the last bit: gradients are differences of such numbers.
    """
    heaviest = T.exp2(fused(build, finite(largest), factor, -finite(row_max)))
    multiplied = row_sum + (T.cast(T.cast(heaviest, build.dtype), "float32") - heaviest)
    # It is 0 or infinite where row_max was rounded by more than half precision holds.
    is_number = (multiplied > 0) & (multiplied < INFINITY)
    return 1 / T.Select(is_number, multiplied, T.Select(row_sum == 0, T.float32(1), row_sum))
