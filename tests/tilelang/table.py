"""A kernel that writes down what expressions give for every score. By TileLang's C target it runs on a CPU."""

import tilelang.language as T

from tilewise.kernels.tilelang.source import tiles
from tilewise.kernels.tilelang.source.tiles import Place, loaded


def table(build, variant, shape):
    """shape: what sizes and positions the expressions find."""
    fields = {
        tiles.BATCH: shape.first_batch, tiles.ORIGIN_Q: shape.origin_q, tiles.ORIGIN_K: shape.origin_k,
        tiles.TOTAL_Q: shape.total_q, tiles.TOTAL_K: shape.total_k,
        tiles.PACKED_Q: shape.packed_q, tiles.PACKED_K: shape.packed_k,
    }  # fmt: skip
    record = {field: T.int32(number) for field, number in fields.items()}.__getitem__
    sizes = (shape.batch, shape.heads, shape.n_q, shape.n_k)

    @T.prim_func
    def table(
        s: T.Tensor(sizes, "float32"),
        out: T.Tensor((len(variant.expressions), *sizes), "float32"),
        a0: loaded(build, 0),
        a1: loaded(build, 1),
        a2: loaded(build, 2),
        a3: loaded(build, 3),
        a4: loaded(build, 4),
        a5: loaded(build, 5),
        a6: loaded(build, 6),
        a7: loaded(build, 7),
    ):
        with T.Kernel(shape.heads, shape.batch, threads=1) as (h, b):
            arrays = (a0, a1, a2, a3, a4, a5, a6, a7)
            place = Place.of(build, variant, record, b, h, h // shape.group, arrays)
            for q, k in T.grid(shape.n_q, shape.n_k):
                for i, name in enumerate(variant.expressions):
                    out[i, b, h, q, k] = T.cast(place.at(name, s[b, h, q, k], q, k), "float32")

    return table
