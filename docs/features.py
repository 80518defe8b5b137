"""Which backend has which feature, and which one `auto` takes where: asked of the backends, for README's two tables.

No GPU and no optional package is needed: GPUs are imagined, as in support.py, which has the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

from docs.markdown import table
from docs.support import SYSTEMS
from tilewise import choosing, dispatch
from tilewise.cases import Case
from tilewise.choosing import Purpose
from tilewise.kernels import gpus
from tilewise.linear import dispatch as linear
from tilewise.spec import Shape

HOPPER, OTHERS = "sm_90", ("sm_80", "sm_89", "sm_100")
_FOR_GPUS = ("cuda", "triton", "cute", "tilelang")
_CAUSAL = Case("causal", "several tiles", "bfloat16")
_OWN = tuple(replace(_CAUSAL, variant=name) for name in ("heads differ", "masking score", "functions"))
_LEARNED = tuple(replace(_CAUSAL, variant=name) for name in ("alibi slopes", "relative signed", "t5", "bias", "sinks"))

Asked = Callable[[str], "str | None"]  # of a backend, why it has not the feature


def _forward(*cases: Case, on: tuple[str, ...] = ("",)) -> Asked:
    """on: these GPUs, or the CPU, and not what the backend is made for."""
    return lambda name: next(filter(None, (_reason(name, case, arch=arch) for arch in on for case in cases)), None)


def _gradients(*cases: Case) -> Asked:
    return lambda name: next(filter(None, (_reason(name, case, backward=True) for case in cases)), None)


def _linear(name: str) -> str | None:
    if name not in linear.SYSTEMS:
        return "it has no linear attention"
    with _as_on_a_gpu():
        return linear.kernel(name).unsupported(Shape(1, 2, 2, 64, 64, 64, 64, "bfloat16", device=_device(_home(name))))


FEATURES: dict[str, Asked] = {
    "CPUs": _forward(replace(_CAUSAL, dtype="float32"), on=("cpu",)),
    "NVIDIA Hopper": _forward(_CAUSAL, on=(HOPPER,)),
    "NVIDIA Ampere, Ada, Blackwell": _forward(_CAUSAL, on=OTHERS),
    "picked by `auto`": lambda name: None if name in dispatch.NAMES else "only if it is named",
    "float16, bfloat16": _forward(replace(_CAUSAL, dtype="float16"), _CAUSAL),
    "float32": _forward(replace(_CAUSAL, dtype="float32")),
    "float64": _forward(replace(_CAUSAL, dtype="float64")),
    "any mask, any score": _forward(*_OWN),
    "gradients of q, k, v": _gradients(_CAUSAL, *_OWN),
    "gradients of biases, tables, slopes": _gradients(*_LEARNED),
    "grouped heads, packed sequences": _gradients(replace(_CAUSAL, shape="grouped"), replace(_CAUSAL, shape="packed")),
    "head dimensions to 256": _gradients(replace(_CAUSAL, shape="head of 256")),
    "head dimensions to 512": _gradients(replace(_CAUSAL, shape="largest head")),
    "decoding with a KV cache": _forward(replace(_CAUSAL, shape="one query")),
    "rotary embedding": _gradients(replace(_CAUSAL, variant="rope")),
    "linear attention": _linear,
}


def ticks() -> str:
    """A row a feature, a column a backend."""
    rows = [(what, *("✓" if asked(name) is None else "" for name in SYSTEMS)) for what, asked in FEATURES.items()]
    return table(("", *(f"`{name}`" for name in SYSTEMS)), rows)


def automatic(arch: str, purpose: Purpose) -> str:
    """The backend that `auto` takes for half precision, if all are installed."""
    case = replace(_CAUSAL, shape="one query") if purpose is Purpose.DECODE else _CAUSAL
    order = choosing.order(arch, case.dtype, purpose)
    taken = next(name for name in order if _reason(name, case, purpose is Purpose.BACKWARD, arch) is None)
    return taken.split("/")[0]


def _reason(name: str, case: Case, backward: bool = False, arch: str = "") -> str | None:
    call = case.inputs().call()
    shape = replace(call.shape, device=_device(arch or _home(name)), backward=backward)
    with _as_on_a_gpu():
        return dispatch.kernel(name).unsupported(call.spec, shape)


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Without Triton's interpreter, which tests set and which is no use of a CPU; with a compiler of TileLang's."""
    kernels = "tilewise.linear.kernels"
    with ExitStack() as stack:
        for interpreted in ("tilewise.kernels.triton.is_interpreted", f"{kernels}.triton.is_interpreted"):
            stack.enter_context(patch(interpreted, lambda: False))
        stack.enter_context(patch(f"{kernels}.tilelang.not_compiled", lambda target: None))
        yield


def _home(name: str) -> str:
    """What a backend is made for."""
    return HOPPER if name.split("/")[0] in _FOR_GPUS else "cpu"


def _device(arch: str) -> str:
    return arch if arch == "cpu" else gpus.imagined(arch)
