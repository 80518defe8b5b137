"""Tilewise: exact attention, computed tile by tile. One definition of a variant, every kernel system."""

from tilewise._version import __version__
from tilewise.api import attention, attention_varlen, attention_vjp, decode, explain, weights
from tilewise.cache import KVCache, PagedKVCache
from tilewise.dispatch import Unsupported
from tilewise.expr import HK, KP, NK, NQ, QP, B, Expr, H, K, Q, S, exp, load, log, maximum, minimum, tanh, where
from tilewise.flex import from_mask_mod, from_score_mod
from tilewise.kernels.cpu.library import get_num_threads, set_num_threads
from tilewise.linear import LinearGrads, LinearState, linear_attention, linear_attention_vjp
from tilewise.merging import merge
from tilewise.picture import picture
from tilewise.projection import fused_qkv_projection
from tilewise.rope import Rope
from tilewise.rotating import apply_rope
from tilewise.sdpa import scaled_dot_product_attention
from tilewise.spec import Grads, Partial, Tile
from tilewise.text import ExpressionError, parse
from tilewise.variants import alibi, bias, causal, dense, dilated, document, prefix, relative, softcap, t5, window

__all__ = [
    "HK",
    "KP",
    "NK",
    "NQ",
    "QP",
    "B",
    "Expr",
    "ExpressionError",
    "Grads",
    "H",
    "K",
    "KVCache",
    "LinearGrads",
    "LinearState",
    "PagedKVCache",
    "Partial",
    "Q",
    "Rope",
    "S",
    "Tile",
    "Unsupported",
    "__version__",
    "alibi",
    "apply_rope",
    "attention",
    "attention_varlen",
    "attention_vjp",
    "bias",
    "causal",
    "decode",
    "dense",
    "dilated",
    "document",
    "exp",
    "explain",
    "from_mask_mod",
    "from_score_mod",
    "fused_qkv_projection",
    "get_num_threads",
    "linear_attention",
    "linear_attention_vjp",
    "load",
    "log",
    "maximum",
    "merge",
    "minimum",
    "parse",
    "picture",
    "prefix",
    "relative",
    "scaled_dot_product_attention",
    "set_num_threads",
    "softcap",
    "t5",
    "tanh",
    "weights",
    "where",
    "window",
]
