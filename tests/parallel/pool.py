"""Real processes with Gloo between them, started once: each runs the functions that it is sent, as all others do.

They are forks of a server that has imported what tests need, so that PyTorch is imported once, not in each of them;
those of a GPU are begun afresh, as a process that was forked after CUDA began has none. What one prints, and where it
was when it ended or was no longer waited for, is in the message of the test that asked it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed import DeviceMesh

import tilewise as tw
from tilewise import dispatch

MESHES = {"2": [0, 1], "3": [0, 1, 2], "4": [0, 1, 2, 3], "2 x 2": [[0, 1], [2, 3]], "1": [0]}
PATIENCE = 120.0  # seconds for an answer
ENDED = "a process of the pool ended, or does not answer"
_IMPORTED = [f"tests.parallel.{name}" for name in ("problem", "test_failures", "test_modules", "test_traffic")]
_WORDS = 6000  # characters of what an ended process left
_meshes: dict[str, DeviceMesh] = {}


def mesh(name: str) -> DeviceMesh:
    """The mesh of this name, in a process of the pool."""
    return _meshes[name]


class Pool:
    """size processes; `run` calls a function in each, and hands back what they return, or raises what one raised.

    timeout: of the process group. patience: for an answer; a process that gave none is asked nothing more.
    """

    def __init__(
        self, size: int = 4, timeout: float = 60, meshes: bool = True, backend: str = "gloo",
        patience: float = PATIENCE, afresh: bool = False,
    ) -> None:  # fmt: skip
        _on_one_machine()
        context = multiprocessing.get_context("spawn" if afresh else "forkserver")
        if not afresh:
            context.set_forkserver_preload(_IMPORTED)
        self.folder, self.patience, self.is_usable = tempfile.TemporaryDirectory(), patience, True
        port, self.pipes, self.processes = _free_port(), [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, port, timeout, meshes, backend, str(self._log(rank)), theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        answers = self.outcomes(function, *args)
        failures = [x for x in answers if isinstance(x, Failure)]
        told = [x.text for x in sorted(failures, key=lambda x: x.kind == "PeerError")]  # which another's error caused
        told += [self._last_words(rank) for rank, x in enumerate(answers) if x is ENDED]
        assert not told, "\n".join(told)
        return answers

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The same, with a Failure in the place of what a process raised, or ENDED."""
        assert self.is_usable, "a process of the pool ended in a test before this one, whose message says how"
        for pipe in self.pipes:
            try:
                pipe.send((function, args))
            except BrokenPipeError:
                self.is_usable = False
        until = time.monotonic() + self.patience
        answers = [_answer(pipe, until - time.monotonic()) for pipe in self.pipes]
        self.is_usable &= not any(x is ENDED for x in answers)
        return answers

    def _log(self, rank: int) -> Path:
        return Path(self.folder.name) / f"{rank}.log"

    def _last_words(self, rank: int) -> str:
        process = self.processes[rank]
        process.join(1)
        how = f"ended with {process.exitcode}"
        if process.is_alive():
            how = f"gave no answer within {self.patience:.0f} s; this is where it is"
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.5)
        log = self._log(rank)
        left = log.read_text(errors="replace")[-_WORDS:] if log.exists() else ""
        return f"rank {rank} {how}:\n{left or 'it printed nothing'}"

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(2 if self.is_usable else 0)
            process.kill()
            process.join()
        self.folder.cleanup()


class Failure:
    """What a process raised."""

    def __init__(self, error: BaseException) -> None:
        self.kind, self.message, self.text = type(error).__name__, str(error), traceback.format_exc()


def _on_one_machine() -> None:
    """Processes inherit it: a thread each for NumPy too, and no search for a network, which a machine may not have."""
    names = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    if Path("/sys/class/net/lo").exists():
        names |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
    for name, value in names.items():
        os.environ.setdefault(name, value)


def _answer(pipe: Any, patience: float) -> Any:
    try:
        return pipe.recv() if pipe.poll(max(patience, 0)) else ENDED
    except (EOFError, ConnectionResetError):
        return ENDED


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _serve(rank: int, size: int, port: int, timeout: float, meshes: bool, backend: str, log: str, pipe: Any) -> None:
    _print_to(log)
    try:
        _join(rank, size, port, timeout, meshes, backend)
    except BaseException as error:  # the first test that asks is told, where a broken pipe would tell nothing
        pipe.recv()
        pipe.send(Failure(error))
        return
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        except BaseException as error:  # what it was sent cannot be imported here
            pipe.send(Failure(error))
            continue
        try:
            pipe.send(function(*args))
        except BaseException as error:  # whatever it is, pytest's own too, it is the test's to judge
            pipe.send(Failure(error))


def _print_to(log: str) -> None:
    """Libraries print to the process's own outputs; so does Python when it is killed, or told to say where it is."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for output in (1, 2):
        os.dup2(file, output)
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


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
