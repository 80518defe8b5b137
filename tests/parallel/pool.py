"""Real processes with Gloo between them, started once: each runs the functions that it is sent, as all others do.

They are forks of a server that has imported what tests need, so that PyTorch is imported once, not in each of them.
"""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed import DeviceMesh

import tilewise as tw
from tilewise import dispatch

MESHES = {"2": [0, 1], "3": [0, 1, 2], "4": [0, 1, 2, 3], "2 x 2": [[0, 1], [2, 3]], "1": [0]}
PATIENCE = 120  # seconds for an answer
ENDED = "a process of the pool ended, or does not answer"
_IMPORTED = [f"tests.parallel.{name}" for name in ("problem", "test_failures", "test_modules", "test_traffic")]
_meshes: dict[str, DeviceMesh] = {}


def mesh(name: str) -> DeviceMesh:
    """The mesh of this name, in a process of the pool."""
    return _meshes[name]


class Pool:
    """size processes; `run` calls a function in each, and hands back what they return, or raises what one raised."""

    def __init__(self, size: int = 4, timeout: float = 60, meshes: bool = True, backend: str = "gloo") -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED)
        port, self.pipes, self.processes = _free_port(), [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, port, timeout, meshes, backend, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        answers = self.outcomes(function, *args)
        for answer in answers:
            assert answer != ENDED
            assert not isinstance(answer, Failure), answer.text
        return answers

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The same, with a Failure in the place of what a process raised, or ENDED."""
        for pipe in self.pipes:
            pipe.send((function, args))
        return [_answer(pipe) for pipe in self.pipes]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            process.kill()


class Failure:
    """What a process raised."""

    def __init__(self, error: Exception) -> None:
        self.kind, self.message, self.text = type(error).__name__, str(error), traceback.format_exc()


def _answer(pipe: Any) -> Any:
    try:
        return pipe.recv() if pipe.poll(PATIENCE) else ENDED
    except EOFError:
        return ENDED


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _serve(rank: int, size: int, port: int, timeout: float, meshes: bool, backend: str, pipe: Any) -> None:
    try:
        _join(rank, size, port, timeout, meshes, backend)
    except Exception as error:  # the first test that asks is told, where a broken pipe would tell nothing
        pipe.recv()
        pipe.send(Failure(error))
        return
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(function(*args))
        except Exception as error:  # whatever it is, it is the test's to judge
            pipe.send(Failure(error))


def _join(rank: int, size: int, port: int, timeout: float, meshes: bool, backend: str) -> None:
    torch.set_num_threads(1)
    if dispatch.kernel("cpu").unavailable() is None:
        tw.set_num_threads(1)
    store, patience = f"tcp://127.0.0.1:{port}", timedelta(seconds=timeout)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=patience)
    if meshes:
        kind = "cuda" if backend == "nccl" else "cpu"
        able = {name: ranks for name, ranks in MESHES.items() if torch.tensor(ranks).max() < size}
        _meshes.update((name, DeviceMesh(kind, ranks)) for name, ranks in able.items())
