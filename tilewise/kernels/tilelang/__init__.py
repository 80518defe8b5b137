"""The TileLang kernel system: tiles, copies and products as TileLang writes them, compiled when first called."""

from __future__ import annotations

import sys
from typing import Any

from tilewise import arrays
from tilewise.dispatch import Unsupported
from tilewise.kernels import gpus, host
from tilewise.kernels.tensors import as_tensor, device_of, grads_like, partial_like, rows
from tilewise.kernels.tilelang import compiler, support
from tilewise.kernels.tilelang.choices import Pass, chosen
from tilewise.kernels.tilelang.compiler import C
from tilewise.spec import Attention, Grads, Partial, Shape, Tile

STANDS_IN = "kernel='tilelang-c' computes the same in main memory, slowly"


class TileLangKernel:
    """On CUDA tensors of PyTorch. rung: "simple" is the kernel to read first, for one head."""

    summary = "TileLang, on NVIDIA GPUs"
    system = "tilelang"

    def __init__(self, rung: str | None = None) -> None:
        self.name = self.system if rung is None else f"{self.system}/{rung}"
        self.simple = rung == "simple"

    def unavailable(self) -> str | None:
        reason = gpus.for_amd() or gpus.none_here()
        return None if reason is None else f"{reason}; {STANDS_IN}"

    def unsupported(self, spec: Attention, shape: Shape) -> str | None:
        away = gpus.elsewhere(shape)
        if away is not None:
            return f"{away}; {STANDS_IN}"
        capability = gpus.capability(shape.device)
        if capability != support.CAPABILITY:
            return f"it is made for compute capability 9.0, and {shape.device} has {capability[0]}.{capability[1]}"
        target = architecture(capability)
        refused = self._refused(spec, shape, target)
        return refused if refused or gpus.is_imagined(shape.device) else self._not_compiled(spec, shape, target)

    def _not_compiled(self, spec: Attention, shape: Shape, target: str) -> str | None:
        """Why there is no kernel for a call that could be computed: none was compiled before, and none can be now."""
        reason = compiler.not_installed(target)
        if reason is None:
            return None
        from tilewise.kernels.tilelang.call import builds_of
        from tilewise.kernels.tilelang.library import is_kept

        missing = [build for build in builds_of(spec, shape, target, self.simple) if not is_kept(build)]
        return f"no kernel for it was compiled before ({missing[0]}), and to compile one {reason}" if missing else None

    def _refused(self, spec: Attention, shape: Shape, target: str) -> str | None:
        return (support.too_much(spec, shape) if self.simple else None) or support.unsupported(spec, shape, target)

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        kind = Pass.SIMPLE if self.simple else Pass.FORWARD
        return chosen(kind, spec, shape, self._target(shape.device)).tile

    def forward(self, spec: Attention, q: Any, k: Any, v: Any, tile: Tile | None = None) -> Partial:
        """tile: taken as a wish; a GPU's are multiples of 64."""
        from tilewise.kernels.tilelang.launch import forward, simple

        computed = simple if self.simple else forward
        with device_of(q):
            done = computed(spec, as_tensor(q), as_tensor(k), as_tensor(v), tile, self._target(arrays.device_name(q)))
        return partial_like(done, q)

    def backward(
        self, spec: Attention, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any = None,
        tile: Tile | None = None,
    ) -> Grads:  # fmt: skip
        from tilewise.kernels.tilelang.launch import backward

        dtype = self._computed_with(as_tensor(d_out), as_tensor(q))
        wide = sys.modules["torch"].float32
        held = Partial(rows(saved.out, dtype), rows(saved.lse, wide))  # another system may have saved them
        d_lse = None if d_lse is None else rows(d_lse, wide)
        target = self._target(arrays.device_name(q))
        with device_of(q):
            of_q, of_k, of_v, of_out = (rows(x, dtype) for x in (q, k, v, d_out))
            grads = backward(spec, of_q, of_k, of_v, held, of_out, d_lse, tile, target)
        return grads_like(grads, spec, q, k, v)

    def _computed_with(self, d_out: Any, q: Any) -> Any:
        """The type of q: a gradient of the output that is wider would be rounded to it."""
        if d_out.dtype != q.dtype:
            told = f"the gradient of the output is {d_out.dtype} and q is {q.dtype}"
            raise Unsupported(
                f"kernel {self.name!r} cannot compute this call: {told}, and it has no float32; "
                "convert the gradient with .to(q.dtype), or take kernel='triton'"
            )
        return q.dtype

    def _target(self, device: str) -> str:
        return architecture(gpus.capability(device))


class TileLangCKernel(TileLangKernel):
    """The same kernels on arrays in main memory, by TileLang's C target: one thread, no barriers, slow."""

    summary = "TileLang's kernels on a CPU, slowly: for tests"
    system = "tilelang-c"

    def unavailable(self) -> str | None:
        return compiler.not_installed(C)

    def unsupported(self, spec: Attention, shape: Shape) -> str | None:
        return host.unsupported(shape) or self._refused(spec, shape, C)

    def _computed_with(self, d_out: Any, q: Any) -> Any:
        torch = sys.modules["torch"]
        return q.dtype if d_out.dtype == q.dtype else torch.float32

    def _target(self, device: str) -> str:
        return C


def architecture(capability: tuple[int, int]) -> str:
    """What to compile for; Hopper has instructions of its own."""
    major, minor = capability
    return f"sm_{major}{minor}{'a' if capability == (9, 0) else ''}"
