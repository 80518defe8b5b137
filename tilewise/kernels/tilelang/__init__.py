"""The TileLang kernel system: tiles, copies and products as TileLang writes them, compiled when first called."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

from tilewise import arrays
from tilewise.dispatch import Unsupported
from tilewise.kernels import host
from tilewise.kernels.tilelang import compiler, support
from tilewise.kernels.tilelang.choices import Pass, chosen
from tilewise.kernels.tilelang.compiler import C
from tilewise.spec import Attention, Grads, Partial, Shape, Tile


class TileLangKernel:
    """On CUDA tensors of PyTorch. rung: "simple" is the kernel to read first, for one head."""

    summary = "TileLang, on NVIDIA GPUs"
    system = "tilelang"

    def __init__(self, rung: str | None = None) -> None:
        self.name = self.system if rung is None else f"{self.system}/{rung}"
        self.simple = rung == "simple"

    def unavailable(self) -> str | None:
        return _no_gpu()

    def unsupported(self, spec: Attention, shape: Shape) -> str | None:
        if not shape.device.startswith("cuda"):
            return f"it computes on NVIDIA GPUs and the arrays are on {shape.device}; move them with .cuda()"
        capability = _capability(shape.device)
        if capability != support.CAPABILITY:
            return f"it is made for compute capability 9.0, and {shape.device} has {capability[0]}.{capability[1]}"
        target = architecture(capability)
        return self._refused(spec, shape, target) or self._not_compiled(spec, shape, target)

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
        return chosen(Pass.FORWARD, shape, self._target(shape.device)).tile

    def forward(self, spec: Attention, q: Any, k: Any, v: Any, tile: Tile | None = None) -> Partial:
        """tile: taken as a wish; a GPU's are multiples of 64."""
        from tilewise.kernels.tilelang.launch import forward, simple

        computed = simple if self.simple else forward
        with _device_of(q):
            done = computed(spec, _tensor(q), _tensor(k), _tensor(v), tile, self._target(arrays.device_name(q)))
        return Partial(_like(done.out, q), _like(done.lse, q))

    def backward(
        self, spec: Attention, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any = None,
        tile: Tile | None = None,
    ) -> Grads:  # fmt: skip
        from tilewise.kernels.tilelang.launch import backward

        dtype = self._computed_with(_tensor(d_out), _tensor(q))
        wide = sys.modules["torch"].float32
        held = Partial(_rows(saved.out, dtype), _rows(saved.lse, wide))  # another system may have saved them
        d_lse = None if d_lse is None else _rows(d_lse, wide)
        target = self._target(arrays.device_name(q))
        with _device_of(q):
            of_q, of_k, of_v, of_out = (_rows(x, dtype) for x in (q, k, v, d_out))
            grads = backward(spec, of_q, of_k, of_v, held, of_out, d_lse, tile, target)
        sinks = None if grads.sinks is None else _like(grads.sinks, spec.sinks)
        wanted = tuple(_like(x, slot.array) for x, slot in zip(grads.arrays, spec.wanted, strict=True))
        d_q, d_k, d_v = (_like(grad.to(_tensor(x).dtype), x) for grad, x in ((grads.q, q), (grads.k, k), (grads.v, v)))
        return Grads(d_q, d_k, d_v, sinks, wanted)

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
        return architecture(_capability(device))


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


def _capability(device: str) -> tuple[int, int]:
    found: tuple[int, int] = sys.modules["torch"].cuda.get_device_capability(device)
    return found


def _no_gpu() -> str | None:
    """PyTorch is asked, but never imported for it: who has tensors on a GPU has imported it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "nothing is on a GPU: PyTorch is not imported in this process"
    return None if torch.cuda.is_available() else "PyTorch finds no NVIDIA GPU, or was built without CUDA"


def _device_of(x: Any) -> Any:
    """Kernels are launched on the current device."""
    return sys.modules["torch"].cuda.device_of(x) if arrays.is_torch(x) and x.is_cuda else nullcontext()


def _tensor(x: Any) -> Any:
    return x if arrays.is_torch(x) else arrays.as_tensor(x)


def _rows(x: Any, dtype: Any) -> Any:
    """In a type, numbers of a row side by side."""
    x = _tensor(x).to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def _like(result: Any, template: Any) -> Any:
    return result if arrays.is_torch(template) else arrays.like(arrays.as_numpy(result), template)
