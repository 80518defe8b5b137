"""Tilewise: exact attention, computed tile by tile. One definition of a variant, every kernel system."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:  # type checkers see these modules, and no name that there is not
    from tilewise import integrations as integrations
    from tilewise import lab as lab
    from tilewise import nn as nn
    from tilewise import parallel as parallel
else:
    # `tw.nn` works after `import tilewise as tw` alone, which imports neither them nor the PyTorch that some need.
    _LAZY = ("integrations", "lab", "nn", "parallel")

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module 'tilewise' has no attribute {name!r}")
        try:
            return _import_module(f"tilewise.{name}")
        except ImportError as error:  # hasattr() and inspect expect an AttributeError
            advice = "it needs PyTorch: pip install torch" if error.name == "torch" else str(error)
            raise AttributeError(f"tilewise.{name} cannot be imported: {advice}") from error

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LAZY})


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
