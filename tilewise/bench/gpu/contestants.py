"""Who takes part on a GPU: our kernels, and what a user would call instead, each in the layout it likes best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from tilewise import api, dispatch
from tilewise.bench.contestants import OURS
from tilewise.bench.gpu import module, projection
from tilewise.bench.gpu.cases import VARIANTS, Case, Extras, Inputs, Options
from tilewise.bench.process import load
from tilewise.bench.refusal import RefusedError
from tilewise.cache import Cache, KVCache, PagedKVCache

CUDNN, FLASH, FLEX = "cuDNN", "FlashAttention-4", "FlexAttention"
SDPA, SDPA_CUDNN, SDPA_FLASH = "torch sdpa", "torch sdpa cudnn", "torch sdpa flash"
EFFICIENT, SDPA_MATH = "torch sdpa efficient", "torch sdpa math"
FLASH_2, FLASH_3 = "FlashAttention-2", "FlashAttention-3"
FLASH_ORDERED = FLASH + " deterministic"  # its gradients have the same bits each time
DENSE, NO_GRAD, PAGED = " dense", " no_grad", " paged"  # what follows the name of ours
MODULE = " module"  # of multi-head attention
OUR_MODULE, SDPA_MODULE = f"{OURS}auto{MODULE}", f"{SDPA_CUDNN}{MODULE}"
PROJECTION = " projection"  # attention and what is behind it by one kernel
THEN_PRODUCT = " + matmul"  # and behind it the library's product
SDPA_PRODUCT = SDPA + THEN_PRODUCT
PAGE = 64  # keys

Call = Callable[[], Any]
Sets = Sequence[Inputs]
Wanted = tuple[tuple[Any, ...], Any]  # what gets a gradient, and the output's own


@dataclass(frozen=True, eq=False)
class Entry:
    """A contestant set up for a case: a call for each set of inputs, and nothing left to do but the attention."""

    calls: Sequence[Call]
    read: Callable[[Any], Any] = lambda out: out  # its output as the inputs lie
    around: Callable[[], AbstractContextManager[Any]] = nullcontext  # entered before the clock starts
    capturable: bool = True  # in a CUDA graph
    gradients: Sequence[Wanted] | None = None  # of inputs that lie otherwise than those of the case


@dataclass(frozen=True, eq=False)
class Contestant:
    name: str
    enter: Callable[[Case, Sets], Entry]  # or raises RefusedError
    missing: Callable[[], str | None] = lambda: None
    ours: bool = False


def entered(contestant: Contestant, case: Case, sets: Sets) -> Entry:
    """Ready for what the case asks for."""
    entry = contestant.enter(case, sets)
    return _gradients(entry, sets) if case.backward else entry


def _gradients(entry: Entry, sets: Sets) -> Entry:
    """Forward is called here. autograd goes back on the stream where that was: no graph can capture it alone."""
    import torch

    with entry.around():
        outputs = [call() for call in entry.calls]
    gradients, read = entry.gradients, lambda grads: tuple(map(entry.read, grads))
    if gradients is None:
        outputs, read = [entry.read(out) for out in outputs], lambda grads: grads
        gradients = [(x.wanted, x.d_out) for x in sets]
    calls = [
        partial(torch.autograd.grad, out, wanted, d_out, retain_graph=True)
        for out, (wanted, d_out) in zip(outputs, gradients, strict=True)
    ]
    return Entry(calls, read, entry.around, capturable=False)


def find(name: str) -> Contestant:
    if name.startswith(OURS):
        return _ours(name)
    if ":" in name:  # one from elsewhere, as "module:attribute"
        found: Contestant = load(name)
        return found
    return next(peer for peer in _PEERS if peer.name == name)


# -- ours -------------------------------------------------------------------------------------------------------------


def _ours(name: str) -> Contestant:
    if name == OUR_MODULE:
        return Contestant(name, _enter_module, ours=True)
    if name.endswith(PROJECTION):
        kernel = name.removeprefix(OURS).removesuffix(PROJECTION)
        return Contestant(name, _enter_projection, partial(_unavailable, kernel), ours=True)
    if name.endswith(THEN_PRODUCT):  # stands beside that as its peer
        kernel = name.removeprefix(OURS).removesuffix(THEN_PRODUCT)
        return Contestant(name, partial(_enter_ours_and_product, kernel), partial(_unavailable, kernel))
    kernel = name.removeprefix(OURS).removesuffix(DENSE).removesuffix(NO_GRAD).removesuffix(PAGED)
    if name.endswith(PAGED):
        return Contestant(name, partial(_enter_paged, kernel), partial(_unavailable, kernel), ours=True)
    if name.endswith(DENSE):  # stands beside the packed call as its peer
        return Contestant(name, partial(_enter_dense, kernel), partial(_unavailable, kernel))
    enter = _enter_without_gradients if name.endswith(NO_GRAD) else _enter_ours
    return Contestant(name, partial(enter, kernel), partial(_unavailable, kernel), ours=True)


def _unavailable(kernel: str) -> str | None:
    import torch  # noqa: F401 - a kernel looks for a GPU only where PyTorch is

    try:
        return dispatch.kernel(kernel).unavailable()
    except ValueError:
        return f"there is no kernel {kernel!r}"


def _enter_ours(kernel: str, case: Case, sets: Sets) -> Entry:
    options = {**VARIANTS[case.variant].options(case, sets[0].extras), "kernel": kernel}
    if case.queries:
        return _decoding([KVCache.like(x.k, x.v, capacity=case.n) for x in sets], sets, options)
    if case.packed:
        return Entry([partial(api.attention_varlen, x.q, x.k, x.v, x.lengths, x.lengths, **options) for x in sets])
    return Entry([partial(api.attention, x.q, x.k, x.v, **options) for x in sets])


def _enter_module(case: Case, sets: Sets) -> Entry:
    return Entry(module.ours(case, sets), capturable=False)


def _enter_projection(case: Case, sets: Sets) -> Entry:
    return Entry(projection.at_once(case, sets))


def _enter_ours_and_product(kernel: str, case: Case, sets: Sets) -> Entry:
    options = {**VARIANTS[case.variant].options(case, sets[0].extras), "kernel": kernel}
    return Entry(projection.one_by_one(case, sets, partial(api.attention, **options)))


def _enter_paged(kernel: str, case: Case, sets: Sets) -> Entry:
    """Pages of all sequences, in the order in which keys came."""
    pages = case.batch * -(-case.n // PAGE)
    caches = [PagedKVCache.like(x.k, x.v, pages=pages, page_size=PAGE) for x in sets]
    return _decoding(caches, sets, {**VARIANTS[case.variant].options(case, sets[0].extras), "kernel": kernel})


def _decoding(caches: Sequence[Cache], sets: Sets, options: dict[str, Any]) -> Entry:
    """A step of each sequence, over caches that are filled before."""
    for cache, x in zip(caches, sets, strict=True):
        cache.append(x.k, x.v)
    return Entry([partial(api.decode, x.q, cache, **options) for cache, x in zip(caches, sets, strict=True)])


def _enter_dense(kernel: str, case: Case, sets: Sets) -> Entry:
    """The packed sequences, which are equally long, as a batch, in the same memory."""
    if case.packed == "ragged":
        raise RefusedError("cannot express", "sequences of different lengths are no batch")

    def batch(x: Any) -> Any:
        return x.view(case.batch, case.n, *x.shape[1:]).transpose(1, 2)

    options = {**VARIANTS[case.variant].options(case, sets[0].extras), "kernel": kernel}
    calls = [partial(api.attention, batch(x.q), batch(x.k), batch(x.v), **options) for x in sets]
    return Entry(calls, lambda out: out.transpose(1, 2).flatten(0, 1))


def _enter_without_gradients(kernel: str, case: Case, sets: Sets) -> Entry:
    import torch

    return Entry(_enter_ours(kernel, case, sets).calls, around=torch.no_grad)


# -- PyTorch's SDPA ---------------------------------------------------------------------------------------------------


def _enter_sdpa(backend: str | None, case: Case, sets: Sets) -> Entry:
    """The backend is chosen outside the timed call, as a program would choose it once."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    options = VARIANTS[case.variant].sdpa
    if options is None or case.packed:
        raise RefusedError("cannot express", "SDPA has no such variant without a dense mask")
    if case.group > 1:
        options = {**options, "enable_gqa": True}
    around = nullcontext if backend is None else partial(sdpa_kernel, getattr(SDPBackend, backend))
    return Entry([partial(sdpa, x.q, x.k, x.v, **options) for x in sets], around=around)


def _enter_sdpa_and_product(case: Case, sets: Sets) -> Entry:
    from torch.nn.functional import scaled_dot_product_attention

    options = VARIANTS[case.variant].sdpa
    if options is None:
        raise RefusedError("cannot express", "SDPA has no such variant without a dense mask")
    return Entry(projection.one_by_one(case, sets, partial(scaled_dot_product_attention, **options)))


def _enter_module_on_cudnn(case: Case, sets: Sets) -> Entry:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    around = partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)
    return Entry(module.on_sdpa(case, sets), around=around, capturable=False)


def _enter_efficient(case: Case, sets: Sets) -> Entry:
    """A bias as a dense mask, whose gradient this backend alone computes; others as SDPA has them."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    if case.variant != "bias" or case.packed:
        return _enter_sdpa("EFFICIENT_ATTENTION", case, sets)
    shape = (case.batch, case.heads, case.n, case.n)
    calls = [partial(sdpa, x.q, x.k, x.v, attn_mask=x.extras["bias"].expand(shape)) for x in sets]
    return Entry(calls, around=partial(sdpa_kernel, SDPBackend.EFFICIENT_ATTENTION))


# -- FlashAttention ---------------------------------------------------------------------------------------------------

_FLASH_4, _INSTALL_FLASH_4 = "flash_attn.cute.interface", "pip install --pre flash-attn-4"
_INSTALL_FLASH_3 = "build it from the folder hopper of its repository"


def _no_flash(module: str = _FLASH_4, install: str = _INSTALL_FLASH_4) -> str | None:
    try:
        import_module(module).flash_attn_func  # noqa: B018
    except Exception as error:  # its compiler may fail to load in ways of its own
        told = str(error).splitlines()[:1] or [""]
        name = module.removesuffix(".interface")
        return f"{name} does not load ({type(error).__name__}: {told[0]}); {install}"
    return None


def _enter_flash(case: Case, sets: Sets, module: str = _FLASH_4, **further: Any) -> Entry:
    """(batch, n, heads, d), its own layout, of gradients too."""
    flash_attn_func = import_module(module).flash_attn_func
    options = _flash_options(case, sets[0].extras)

    def call(q: Any, k: Any, v: Any) -> Any:
        done = flash_attn_func(q, k, v, **options, **further)
        return done[0] if isinstance(done, tuple) else done

    def turned(x: Any) -> Any:
        return x.detach().transpose(1, 2).contiguous().requires_grad_(case.backward)

    inputs = [tuple(map(turned, (x.q, x.k, x.v))) for x in sets]
    gradients = None
    if case.backward:
        gradients = [(given, turned(x.d_out).detach()) for given, x in zip(inputs, sets, strict=True)]
    return Entry([partial(call, *x) for x in inputs], lambda out: out.transpose(1, 2), gradients=gradients)


def _flash_options(case: Case, extras: Extras) -> Options:
    """Its own arguments where it has them; where it has none, functions that it compiles."""
    if case.packed:
        raise RefusedError("cannot express", "it is asked for no packed sequences")
    known = VARIANTS[case.variant].flash
    if known is not None:
        return known
    if case.backward:
        raise RefusedError("cannot express", "its backward pass has no gradient of aux_tensors")
    from tilewise.bench.gpu import flash

    return flash.options(case, extras)


# -- FlexAttention ----------------------------------------------------------------------------------------------------


def _enter_flex(case: Case, sets: Sets) -> Entry:
    """Compiled for this shape alone; fullgraph, so that it fails rather than runs uncompiled."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    variant, extras, device = VARIANTS[case.variant], sets[0].extras, sets[0].q.device
    if case.packed:
        raise RefusedError("cannot express", "it is asked for no packed sequences")
    mask = None
    if variant.mask is not None:
        mask = create_block_mask(variant.mask(extras), None, None, case.n, case.n, device=device)
    score = None if variant.score is None else variant.score(extras)
    torch.compiler.reset()  # or the shapes of other cases would count against the limit of compilations
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    options = {"score_mod": score, "block_mask": mask, "scale": 1 / math.sqrt(case.d), "enable_gqa": case.group > 1}
    return Entry([partial(compiled, x.q, x.k, x.v, **options) for x in sets])


_PEERS = (
    Contestant(CUDNN, partial(_enter_sdpa, "CUDNN_ATTENTION")),
    Contestant(FLASH, _enter_flash, _no_flash),
    Contestant(FLASH_ORDERED, partial(_enter_flash, deterministic=True), _no_flash),
    Contestant(
        FLASH_3,
        partial(_enter_flash, module="flash_attn_interface"),
        partial(_no_flash, "flash_attn_interface", _INSTALL_FLASH_3),
    ),
    Contestant(
        FLASH_2, partial(_enter_flash, module="flash_attn"), partial(_no_flash, "flash_attn", "pip install flash-attn")
    ),
    Contestant(FLEX, _enter_flex),
    Contestant(SDPA, partial(_enter_sdpa, None)),
    Contestant(SDPA_CUDNN, partial(_enter_sdpa, "CUDNN_ATTENTION")),
    Contestant(SDPA_FLASH, partial(_enter_sdpa, "FLASH_ATTENTION")),
    Contestant(SDPA_MATH, partial(_enter_sdpa, "MATH")),
    Contestant(EFFICIENT, _enter_efficient),
    Contestant(SDPA_MODULE, _enter_module_on_cudnn),
    Contestant(SDPA_PRODUCT, _enter_sdpa_and_product),
)
