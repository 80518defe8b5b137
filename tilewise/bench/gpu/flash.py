"""Variants that FlashAttention-4 has no argument for, in its own way: functions in CuTe's language, and block sparsity.

It calls them with vectors of indices: of one key, or of two neighbours if a function of scores says so, the most that
it takes on Hopper. The names of a score's arguments are its own.
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from flash_attn.cute.compute_block_sparsity import compute_block_sparsity
from flash_attn.cute.utils import scalar_to_ssa

from tilewise.bench.gpu.cases import Case, Extras, Options

_TILES = {64: (192, 128), 128: (128, 128)}  # of queries and keys by d, as it takes them on Hopper; blocks must be alike


def options(case: Case, extras: Extras) -> Options:
    """The arguments of flash_attn_func, with all that can be prepared before a call."""
    return _WRITTEN[case.variant](case, extras)


@cute.jit
def _by_distance(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
    return score - (q_idx - kv_idx).to(cutlass.Float32) * aux_tensors[0][h[0]]


@cute.jit
def _biased(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
    cell = cute.make_rmem_tensor(1, cutlass.BFloat16)
    cell[0] = aux_tensors[0][q_idx[0], kv_idx[0]]
    return score + cell.load().to(cutlass.Float32)


@cute.jit
def _of_document(b, h, q, k, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
    ids = aux_tensors[0]
    own, other = scalar_to_ssa(ids[q[0]], cutlass.Int32), scalar_to_ssa(ids[k[0]], cutlass.Int32)
    return (k <= q) & (own == other)


_by_distance.__vec_size__ = 2


def _alibi(case: Case, extras: Extras) -> Options:
    return {"causal": True, "score_mod": _by_distance, "aux_tensors": [extras["slopes"]]}


def _bias(case: Case, extras: Extras) -> Options:
    return {"score_mod": _biased, "aux_tensors": [extras["bias"].detach()]}


def _document(case: Case, extras: Extras) -> Options:
    """Which blocks to visit is found out once, and not part of a call: the same for all sequences and heads."""
    ids = extras["ids"]
    blocks = compute_block_sparsity(*_TILES[case.d], 1, 1, case.n, case.n, _of_document, [ids], ids.device)
    return {"mask_mod": _of_document, "aux_tensors": [ids], "block_sparse_tensors": blocks}


_WRITTEN: dict[str, Callable[[Case, Extras], Options]] = {"alibi": _alibi, "bias": _bias, "document": _document}
