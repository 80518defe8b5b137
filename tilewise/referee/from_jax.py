"""JAX's dot_product_attention, by XLA and by cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.referee.calls import Call, Inputs
from tilewise.referee.contender import CAUSAL, HALF, TOP_LEFT, Answer, Contender, Says, absent

_SAYS = frozenset(
    ("gradients", CAUSAL, TOP_LEFT, "mask", "bias", "mask beside causal", "window", "scale", "grouped heads",
     "gradients of the bias")
)  # fmt: skip


class Jax(Contender):
    def __init__(self, implementation: str) -> None:
        self.implementation = implementation
        self.name = "jax/cudnn" if implementation == "cudnn" else "jax"

    @property
    def about(self) -> str:
        return f"jax.nn.dot_product_attention(implementation={self.implementation!r})"

    def missing(self, device: str) -> str | None:
        if device == "cpu" and self.implementation == "cudnn":
            return "cuDNN runs on NVIDIA GPUs; --device cuda judges it there"
        install = "pip install jax" if device == "cpu" else "pip install 'jax[cuda13]'"
        reason = absent("jax", install)
        if reason is None and device != "cpu":
            import jax

            if jax.default_backend() != "gpu":
                return f"JAX sees no GPU here; {install}"
        return reason

    def packages(self) -> tuple[str, ...]:
        return "jax", "jaxlib"

    def says(self, device: str) -> Says:
        dtypes = HALF if self.implementation == "cudnn" else (*HALF, "float32")
        notes = () if device == "cpu" else ("JAX multiplies float32 in TF32 on GPUs, unless asked for more precision",)
        return Says(_SAYS, dtypes, unordered=device != "cpu", notes=notes)

    def prepare(self, call: Call, given: Inputs, device: str) -> Callable[[], Answer]:
        import jax

        where = jax.devices("cpu")[0] if device == "cpu" else jax.devices()[0]

        def put(x: Any) -> Any:
            return jax.device_put(np.ascontiguousarray(_plain(x)), where)

        q, k, v, d_out = (put(x.swapaxes(1, 2)) for x in (given.q, given.k, given.v, given.d_out))
        mask, bias = (None if x is None else put(x) for x in (given.mask, given.bias))
        options: dict[str, Any] = {"scale": call.scale, "is_causal": bool(call.causal)}
        if call.window is not None:
            options["local_window_size"] = call.window

        def forward(q: Any, k: Any, v: Any, bias: Any) -> Any:
            return jax.nn.dot_product_attention(
                q, k, v, bias=bias, mask=mask, implementation=self.implementation, **options
            )

        def both(q: Any, k: Any, v: Any, bias: Any, d_out: Any) -> Any:
            wanted = (q, k, v, bias) if call.bias_gradient else (q, k, v)
            out, pullback = jax.vjp(lambda *x: forward(*(x if call.bias_gradient else (*x, bias))), *wanted)
            return out, pullback(d_out)

        jitted = jax.jit(both if call.backward else forward)

        def run() -> Answer:
            if not call.backward:
                return {"out": _heads_first(jitted(q, k, v, bias))}
            out, grads = jitted(q, k, v, bias, d_out)
            found = dict(zip(("out", "d_q", "d_k", "d_v"), map(_heads_first, (out, *grads[:3])), strict=True))
            return {**found, **({"d_bias": _host(grads[3])} if call.bias_gradient else {})}

        return run


def _plain(x: Any) -> Any:
    """bfloat16 as JAX's NumPy arrays have it."""
    if x.dtype != arrays.BFLOAT16:
        return x
    import ml_dtypes

    return x.view(np.uint16).view(ml_dtypes.bfloat16)


def _host(x: Any) -> Any:
    found = np.asarray(x)
    return arrays.as_numpy(found)


def _heads_first(x: Any) -> Any:
    return _host(x).swapaxes(1, 2)


CONTENDERS = [Jax("xla"), Jax("cudnn")]
