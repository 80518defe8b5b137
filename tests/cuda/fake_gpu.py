"""A GPU that is none: launches of the CUDA kernel system run on the simulator, and CPU tensors are its memory.

What is between a caller and the driver is thereby all real, but for PyTorch's streams and devices.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tilewise import arrays
from tilewise.kernels import cuda
from tilewise.kernels.cuda import simulator, structs
from tilewise.kernels.cuda.source import assembled
from tilewise.kernels.cuda.tensor_map import TensorMap
from tilewise.sharing import Kept


@dataclass
class FakeGpu:
    """How it stands, and what was asked of it."""

    device: int = -1  # what CPU tensors say they are on
    stream: int = 0
    capturing: bool = False
    made_current: list[int] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    launched: list[str] = field(default_factory=list)
    held: list[int] = field(default_factory=list)  # the streams that memory is held for

    @contextlib.contextmanager
    def as_current(self, device: int) -> Iterator[None]:
        before, self.device = self.device, device
        self.made_current.append(device)
        yield
        self.device = before

    def load(self, code: bytes, entry: str) -> tuple[Any, Any]:
        name, text = code.decode().split("\0")
        self.loaded.append(name)
        return None, (name, simulator.compile_source(text))

    def launch(self, function: Any, blocks: int, threads: int, shared_bytes: int, stream: int, arguments: int) -> None:
        assert stream == self.stream
        name, program = function
        self.launched.append(name)
        params = (ctypes.c_byte * structs.MOST_BYTES).from_address(ctypes.c_void_p.from_address(arguments).value or 0)
        program.launch(params, grid=blocks, threads=threads, shared_bytes=shared_bytes)

    def hold_until_done(self, x: Any, device: int) -> None:
        assert arrays.is_torch(x)
        self.held.append(self.stream)

    def replace_address(self, tensor_map: int, address: int) -> None:
        assert address % 16 == 0
        ctypes.c_uint64.from_address(tensor_map).value = address


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    torch = pytest.importorskip("torch")
    from tilewise.kernels.cuda import gpu, launcher, prepared, prepared_arrays
    from tilewise.pytorch import graphs, operator, ready, repeat

    fake = FakeGpu()
    replaced = {
        "current_device": lambda: fake.device, "as_current": fake.as_current,
        "current_stream": lambda device: fake.stream, "ensure_context": lambda device: None,
        "is_capturing": lambda: fake.capturing, "hold_until_done": fake.hold_until_done,
        "zeros": lambda count, device: torch.zeros(count, dtype=torch.int32),
        "whole_numbers": lambda count, device: torch.full((count,), -1, dtype=torch.int32),
        "moved": lambda numbers, device: torch.from_numpy(numbers), "capability": lambda device: (9, 0),
        "multiprocessors": lambda device: 2, "load": fake.load, "allow_shared": lambda *how: None,
        "tensor_map_at": lambda address: address, "replace_address": fake.replace_address, "launch": fake.launch,
    }  # fmt: skip
    for name, function in replaced.items():
        monkeypatch.setattr(gpu, name, function)
    monkeypatch.setattr(
        launcher.compiler, "machine_code", lambda source, arch: f"{source.rung}\0{source.text}".encode()
    )
    monkeypatch.setattr(launcher.compiler, "prebuilt", lambda source, arch: None)
    for module in (prepared, prepared_arrays):
        monkeypatch.setattr(module, "assembled", lambda *call, **how: assembled(*call, simulator.headers(), **how))
    monkeypatch.setattr(TensorMap, "encoded", lambda self: bytes(self.simulated()))
    monkeypatch.setattr(cuda, "_not_installed", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(arrays, "device_name", lambda x: "cuda:0" if arrays.is_torch(x) else "cpu")
    monkeypatch.setattr(ready, "DEVICES", ("cpu",))
    for module, name, empty in (
        (launcher, "_kernels", Kept(8)), (launcher, "_tables", Kept(8)), (launcher, "_readers", Kept(8)),
        (launcher, "_counts", {}), (graphs, "held", {}),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, empty)
    monkeypatch.setattr(launcher, "_rooms", [])
    monkeypatch.setattr(repeat, "known", Kept(512))
    monkeypatch.setattr(operator, "_ready", Kept(256))
    monkeypatch.setattr(operator, "_ready_backward", Kept(256))
    monkeypatch.setattr(operator, "_recognised", {})
    return fake
