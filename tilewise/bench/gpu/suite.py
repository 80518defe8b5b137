"""The GPU suite: the cases by which its targets are proved or missed, in sections. `tilewise bench --gpu`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewise.bench.contestants import OURS
from tilewise.bench.gpu.cases import Case
from tilewise.bench.gpu.contestants import (
    CUDNN,
    DENSE,
    EFFICIENT,
    FLASH,
    FLASH_ORDERED,
    FLEX,
    NO_GRAD,
    OUR_MODULE,
    PAGED,
    PROJECTION,
    SDPA,
    SDPA_CUDNN,
    SDPA_FLASH,
    SDPA_MODULE,
    SDPA_PRODUCT,
    THEN_PRODUCT,
)
from tilewise.bench.gpu.timing import Settings

KERNEL = "cuda"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK_LENGTHS = (1024, 8192)
# FlexAttention is compiled anew for each shape, which takes seconds, and it is not the best peer of any case here.
FLEX_LENGTHS = (2048, 16384)
TRITON, TRITON_LENGTHS = "triton", (1024, 4096, 16384)
HARD = ("falling", "rising", "x8", "x64")
VARIANTS = ("softcap", "alibi", "window 256", "window 1024", "document", "bias")
AHEAD = ("full", "causal", "window 1024")  # `make kernels` compiles them before anyone calls
RUNGS = ("naive", "tiled", "forward_sm90")
SCALINGS = ("basic", "scaled_q", "scaled_k")  # the scale in the exponent, in q and in k
QUICK = Settings(rounds=2, warm=0.005, timed=0.01, host_calls=50)


@dataclass(frozen=True)
class Section:
    name: str
    about: str
    cases: tuple[Case, ...]
    quick: tuple[Case, ...]
    peers: tuple[str, ...] = ()
    host: bool = False  # the host's time of a call, not the GPU's
    kernel: str | None = None  # it is about this one
    first: bool = False  # the first call of a process, not one of many

    def who(self, kernel: str, case: Case) -> list[str]:
        """Ours first."""
        ours = OURS + (self.kernel or kernel)
        if self.name == "ladder":
            return [f"{OURS}{KERNEL}/{rung}" for rung in RUNGS]
        if self.name == "varlen":
            return [ours, ours + DENSE] if case.packed == "equal" else [ours]
        if self.first:
            triton = [OURS + TRITON] if case.variant == "causal" else []
            return [ours, *triton]
        if self.name == "step":
            return [OUR_MODULE, *self.peers]
        if self.name == "scaling":
            return [f"{OURS}cute/{rung}" for rung in SCALINGS]
        if self.name == "projection":
            return [ours + PROJECTION, OURS + kernel + THEN_PRODUCT, *self.peers]
        if self.name == "decode":
            return [ours, ours + PAGED, *self.peers]
        if self.name == "gradients":
            return [ours, f"{OURS}{KERNEL}/unordered", *self.peers]
        mine = [ours, ours + NO_GRAD] if self.host else [ours]
        return [*mine, *(peer for peer in self.peers if self._is_asked(peer, case))]

    def _is_asked(self, peer: str, case: Case) -> bool:
        if self.name == "forward":
            return peer != FLEX or case.n in FLEX_LENGTHS
        if self.name == "backward":
            return peer == FLEX or (peer == EFFICIENT) == (case.variant == "bias")
        if self.name == "cute":
            return (peer == FLEX) == (case.variant == "bias")
        return True


def _grid(
    variants: tuple[str, ...], dims: tuple[int, ...], lengths: tuple[int, ...], group: int = 1
) -> tuple[Case, ...]:
    return tuple(Case(variant, n, d, group) for d in dims for variant in variants for n in lengths)


_MASKS = ("full", "causal")
_STRESS = tuple(
    replace(case, inputs=inputs)
    for case in (*_grid(_MASKS, (128, 64, 256), (4096,)), Case("causal", 1024, 128), Case("full", 1024, 64))
    for inputs in HARD
)
_VARLEN = tuple(
    Case(variant, n, d, packed=packed)
    for packed in ("equal", "ragged")
    for d in (64, 128)
    for variant in _MASKS
    for n in (1024, 4096)
)
_LEARNED = tuple(replace(case, backward=True) for case in _grid(("bias",), (64, 128), (1024, 4096)))
_BACKWARD = (
    *(replace(case, backward=True) for case in _grid(_MASKS, (64, 128, 256), TRITON_LENGTHS)),
    *_LEARNED,
)
_GRADIENTS = tuple(replace(case, backward=True) for case in _grid(_MASKS, (64, 128, 256), LENGTHS))
_TILELANG = _grid(_MASKS, (64, 128), TRITON_LENGTHS)
_STEPS = tuple(replace(case, step=True) for case in _grid(_MASKS, (64, 128), (2048, 8192)))
_DECODE = tuple(
    Case("full", n, 128, group=4, tokens=n * batch, hidden=4096, queries=1)
    for batch, n in ((1, 65536), (16, 8192), (64, 4096))
)
# Inputs that are 8 times as large make scores, and what they are rounded by, as much larger.
_SCALING = tuple(
    Case("full", 2048, d, inputs=inputs, dtype=dtype)
    for dtype in ("bfloat16", "float32")
    for d in (64, 128)
    for inputs in ("normal", "x8")
)
_PROJECTION = tuple(
    Case("full", keys, d, tokens=keys * batch, hidden=heads * d, queries=queries, model=heads * d)
    for heads, d, batch, queries, keys in (
        (4, 32, 1, 1, 64), (4, 32, 128, 1, 64), (4, 32, 32, 64, 64), (4, 32, 32, 16, 512),
        (8, 64, 1, 1, 64), (8, 64, 128, 1, 64), (8, 64, 32, 16, 512), (8, 64, 1, 64, 512), (8, 64, 1, 1, 4096),
        (16, 64, 32, 1, 64), (16, 64, 128, 64, 64), (16, 64, 1, 16, 512), (16, 64, 32, 1, 4096),
    )
)  # fmt: skip
_UNITS = (
    Case("full", 8192, 64), Case("causal", 512, 64), Case("full", 4096, 64, inputs="x64"), Case("full", 8192, 128),
    Case("full", 4096, 128, inputs="x64"), Case("full", 8192, 256), Case("causal", 8192, 256),
)  # fmt: skip
_FIRST = (
    *_grid(AHEAD, (64, 128, 256), (2048,)),
    *_grid(("softcap", "document", "bias", "alibi"), (64, 128), (2048,)),
    *(Case("causal", 2048, d, backward=True) for d in (64, 128)),
)
_LAUNCH = (Case("causal", 128, 64, tokens=128, hidden=1024),)

SECTIONS = {
    section.name: section
    for section in (
        Section(
            "forward",
            "forward, bfloat16",
            _grid(_MASKS, (64, 128, 256), LENGTHS),
            _grid(_MASKS, (64, 128, 256), QUICK_LENGTHS),
            (CUDNN, FLASH, FLEX),
        ),
        Section(
            "stress",
            "scores that grow along the keys, either way, or are large",
            _STRESS,
            tuple(case for case in _STRESS if case.d == 128 and case.n == 4096),
            (CUDNN, FLASH),
        ),
        Section(
            "variants",
            "masks and scores beyond causal",
            _grid(VARIANTS, (64, 128), (2048, 8192)),
            _grid(VARIANTS, (128,), (2048,)),
            (FLEX, FLASH),
        ),
        Section(
            "gqa",
            "8 query heads for each key head",
            _grid(_MASKS, (128,), LENGTHS[1:], group=8),
            _grid(_MASKS, (128,), QUICK_LENGTHS, group=8),
            (CUDNN, FLASH),
        ),
        Section(
            "varlen",
            "packed sequences beside the same ones as a batch, and ragged ones",
            _VARLEN,
            tuple(case for case in _VARLEN if case.d == 128 and case.n == 1024),
        ),
        Section(
            "ladder",
            "the kernels that lead up to the fastest, and their limits",
            _grid(("full",), (64, 128), (1024, 4096)),
            _grid(("full",), (128,), (1024,)),
        ),
        Section(
            "units",
            "how busy the GPU's units are, where peers come near",
            _UNITS,
            _UNITS[:1],
            (CUDNN, FLASH),
        ),
        Section(
            "triton",
            "forward in Triton, bfloat16",
            _grid(_MASKS, (64, 128, 256), TRITON_LENGTHS),
            _grid(_MASKS, (64, 128, 256), (4096,)),
            (FLEX,),
            kernel=TRITON,
        ),
        Section(
            "backward",
            "gradients in Triton, bfloat16; of a bias as well",
            _BACKWARD,
            tuple(case for case in _BACKWARD if case.n == 4096),
            (FLEX, CUDNN, EFFICIENT),
            kernel=TRITON,
        ),
        Section(
            "gradients",
            "gradients in CUDA C++, bfloat16",
            _GRADIENTS,
            tuple(case for case in _GRADIENTS if case.n == 4096 and case.d == 128),
            (CUDNN, FLASH, FLASH_ORDERED),
            kernel="cuda/forward_sm90",
        ),
        Section(
            "learned",
            "gradients in CUDA C++ where a bias has one too, bfloat16",
            _LEARNED,
            tuple(case for case in _LEARNED if case.n == 4096),
            (FLEX, EFFICIENT),
            kernel="cuda/forward_sm90",
        ),
        Section(
            "cute",
            "forward in CuTe DSL, bfloat16; with a bias as well",
            (*_grid(_MASKS, (64, 128, 256), LENGTHS), *_grid(("bias",), (64, 128), (4096,))),
            (*_grid(_MASKS, (128,), QUICK_LENGTHS), Case("bias", 4096, 128)),
            (FLASH, FLEX),
            kernel="cute/forward_sm90",
        ),
        Section(
            "cute_gradients",
            "gradients in CuTe DSL, bfloat16",
            _GRADIENTS,
            tuple(case for case in _GRADIENTS if case.n == 4096 and case.d == 128),
            (FLASH,),
            kernel="cute/forward_sm90",
        ),
        Section(
            "scaling",
            "what the scale is multiplied into, in CuTe's first kernel: time, and error against float64",
            _SCALING,
            tuple(case for case in _SCALING if case.d == 128 and case.inputs == "normal"),
        ),
        Section(
            "projection",
            "attention and the output projection behind it, by one kernel in CuTe DSL",
            _PROJECTION,
            _PROJECTION[:1],
            (SDPA_PRODUCT,),
            kernel="cute",
        ),
        Section(
            "tilelang",
            "forward in TileLang, bfloat16",
            _TILELANG,
            tuple(case for case in _TILELANG if case.n == 4096),
            (CUDNN, FLEX),
            kernel="tilelang",
        ),
        Section(
            "tilelang_gradients",
            "gradients in TileLang, bfloat16",
            tuple(replace(case, backward=True) for case in _TILELANG),
            tuple(replace(case, backward=True) for case in _TILELANG if case.n == 4096),
            (CUDNN, FLEX),
            kernel="tilelang",
        ),
        Section(
            "step",
            "a training step of multi-head attention, projections and all gradients included",
            _STEPS,
            tuple(case for case in _STEPS if case.n == 2048 and case.d == 128),
            (SDPA_MODULE,),
        ),
        Section(
            "decode",
            "a query over a cache larger than L2, 32 heads on 8",
            _DECODE,
            _DECODE[:1],
            (CUDNN, SDPA_FLASH),
            kernel=TRITON,
        ),
        Section(
            "launch",
            "the host's time of a small call, while the GPU works on",
            _LAUNCH,
            _LAUNCH,
            (SDPA, SDPA_CUDNN, SDPA_FLASH),
            host=True,
        ),
        Section(
            "first",
            "the first call of a process, with an empty cache and with a filled one",
            _FIRST,
            tuple(case for case in _FIRST if case.d == 128),
            first=True,
        ),
    )
}
