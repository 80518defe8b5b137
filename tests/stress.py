"""Programs that use a kernel system as no test process should: fork, run out of memory, be interrupted, end midway.

`python -m tests.stress PROGRAM KERNEL` runs one by itself, tests/test_cpu_stress.py all with a time limit. A program
that finds everything right prints "ok" last; one that hangs prints where every thread is.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import tilewise as tw
from tilewise import dispatch
from tilewise.arrays import narrow
from tilewise.expr import NK, NQ, H, K, Q, S

HANG = 90.0  # seconds, after which a program says where it hangs and ends
LONG = 6.0  # seconds of a call that is to be interrupted
_fork = multiprocessing.get_context("fork")


# -- calls, and their bits --------------------------------------------------------------------------------------------


def calls(kernel: str) -> list[Callable[[], bytes]]:
    """Forward and backward passes of different shapes, types and variants; each gives the bits of its results."""
    rng = np.random.default_rng(0)

    def arrays(shapes: list[tuple[int, ...]], dtype: str = "float32") -> list[Any]:
        return [narrow(rng.standard_normal(shape), dtype) for shape in shapes]

    table, ids = rng.standard_normal((3, 9)).astype(np.float32), np.sort(rng.integers(0, 4, 150))
    made = [
        (arrays([(2, 4, 130, 32), (2, 2, 130, 32), (2, 2, 130, 32)]), {"causal": True}),
        (arrays([(1, 3, 77, 40), (1, 3, 201, 40), (1, 3, 201, 24)], "bfloat16"), {"score": tw.softcap(3.0)}),
        (arrays([(3, 3, 64, 16)] * 3, "float64"), {"score": tw.relative(table, grad=True)}),
        (arrays([(1, 2, 150, 64)] * 3, "float16"), {"mask": tw.document(ids)}),
        (arrays([(2, 8, 1, 64), (2, 1, 1500, 64), (2, 1, 1500, 64)]), {"sinks": np.linspace(-1, 1, 8)}),
        (arrays([(1, 2, 300, 8)] * 3), {"mask": (K <= Q + (NK - NQ)) & (abs(Q - K) < 40 * (H + 1))}),
        (arrays([(500, 33), (400, 33), (400, 7)]), {"score": S - 0.01 * abs(Q - K)}),
        (arrays([(4, 90, 96), (4, 90, 96), (4, 90, 96)]), {}),
    ]
    return [lambda given=given, options=options: _both(kernel, given, options) for given, options in made]


def _both(kernel: str, given: list[Any], options: dict[str, Any]) -> bytes:
    out, pullback = tw.attention_vjp(*given, **options, kernel=kernel)
    grads = pullback(out)
    return b"".join(np.ascontiguousarray(x).tobytes() for x in (out, grads.q, grads.k, grads.v, *grads.arrays))


def long_call(kernel: str, seconds: float, backward: bool = False) -> Callable[[], Any]:
    """A call that takes about this long, whatever the machine."""

    def make(n: int) -> Callable[[], Any]:
        q, k, v = np.random.default_rng(0).standard_normal((3, 2, n, 64), dtype=np.float32)
        if not backward:
            return lambda: tw.attention(q, k, v, kernel=kernel)
        out, pullback = tw.attention_vjp(q, k, v, kernel=kernel)
        return lambda: pullback(out)

    n, took = 512, 0.0
    while took < 0.1:
        n *= 2
        call = make(n)
        took = min(_seconds(call) for _ in range(2))  # the first has threads to start
    return make(int(n * (seconds / took) ** 0.5) + 1)


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


# -- programs ---------------------------------------------------------------------------------------------------------


def threads_at_once(kernel: str) -> None:
    """Eight threads at once: the bits are those of each call alone."""
    work = calls(kernel)
    alone = [call() for call in work]
    start = threading.Barrier(len(work))

    def repeat(i: int) -> bool:
        start.wait()
        return all(work[(i + turn) % len(work)]() == alone[(i + turn) % len(work)] for turn in range(12))

    with ThreadPoolExecutor(len(work)) as pool:
        assert all(pool.map(repeat, range(len(work))))


def fork_after_use(kernel: str) -> None:
    """A child of a process that has computed, and a child of that, compute the same bits; so does the parent after."""
    work = calls(kernel)
    alone = [call() for call in work]

    def child(depth: int) -> None:
        assert [call() for call in work] == alone
        if depth:
            _in_child(child, depth - 1)

    for _ in range(3):
        _in_child(child, 1)
        assert [call() for call in work] == alone


def fork_during_a_call(kernel: str) -> None:
    """A fork while other threads are inside calls: the child, which has none of them, computes the same bits."""
    work = calls(kernel)
    alone = [call() for call in work]
    stop = threading.Event()

    def keep_calling(i: int) -> None:
        while not stop.is_set():
            assert work[i]() == alone[i]

    with ThreadPoolExecutor(3) as pool:
        busy = [pool.submit(keep_calling, i) for i in range(3)]
        try:
            for i in range(40):
                _in_child(lambda i=i: _check(work[i % len(work)]() == alone[i % len(work)]))
        finally:
            stop.set()
        for future in busy:
            future.result()


def data_loader(kernel: str) -> None:
    """PyTorch's worker processes, forked from one that has computed, compute in a data set."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    def item(i: int) -> Any:
        x = torch.randn(3, 2, 70, 16, generator=torch.Generator().manual_seed(i))
        return tw.attention(*x[:, None], causal=True, kernel=kernel)

    class Attended(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 24

        def __getitem__(self, i: int) -> Any:
            return item(i)

    alone = torch.stack([item(i) for i in range(24)])
    for _ in range(2):
        loader = DataLoader(Attended(), batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=60)
        assert torch.equal(torch.cat(list(loader)), alone)
        assert torch.equal(item(5), alone[5])


def more_than_memory(kernel: str) -> None:
    """A result larger than any memory is a MemoryError at once, and the next call works."""
    work = calls(kernel)[0]
    alone = work()
    x = np.ones((1, 1, 1, 64), np.float32)
    huge = np.broadcast_to(x, (1, 1, 1 << 38, 64))
    for call in (tw.attention, tw.attention_vjp):
        try:
            call(huge, x, x, kernel=kernel)
        except MemoryError:
            assert work() == alone
        else:
            raise AssertionError("there was no such memory")


def little_memory(kernel: str) -> None:
    """With ever less memory left, a call gives the right bits or MemoryError, before and after threads were started."""
    work = calls(kernel)
    alone = _bits_in_child(work)

    def child(megabytes: float, warm: bool) -> None:
        dispatch.kernel(kernel).unavailable()  # loads what there is to load
        if warm:
            _check([call() for call in work] == alone)
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + int(megabytes * 2**20), before[1]))
        try:
            for call, bits in zip(work, alone, strict=True):
                try:
                    _check(call() == bits)
                except MemoryError:
                    continue
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
        _check([call() for call in work] == alone)

    for megabytes in (0.0, 0.2, 0.5, 1, 2, 4, 8, 16):
        for warm in (True, False) if kernel != "numpy" else (True,):  # BLAS needs its buffers once
            _in_child(child, megabytes, warm)


def interrupted(kernel: str, direction: str) -> None:
    """Ctrl-C ends a long call soon, and the next call works. The test sends it after the line "begun"."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background programs begin without one
    work = calls(kernel)[0]
    alone = work()
    call = long_call(kernel, seconds=LONG, backward=direction == "backward")
    _say("begun")
    began = time.perf_counter()
    try:
        call()
    except KeyboardInterrupt:
        _say("interrupted")
    else:
        _say(f"not interrupted in {time.perf_counter() - began:.1f} s")
    assert work() == alone


def idle(kernel: str) -> None:
    """No thread works, or waits busily, once a call is over."""
    for call in calls(kernel):
        call()
    time.sleep(0.3)  # a moment in which threads may wait for more to come
    before = os.times()
    time.sleep(0.5)
    after = os.times()
    used = after.user + after.system - before.user - before.system
    assert used < 0.1, f"{used:.2f} s of processor time in 0.5 s of sleep"


def interpreter_let_go(kernel: str) -> None:
    """Other Python threads run during a call."""
    call = long_call(kernel, seconds=1.0)
    done = threading.Event()

    def run() -> None:
        call()
        done.set()

    thread = threading.Thread(target=run)
    turns, longest, began = 0, 0.0, time.perf_counter()
    last = began
    thread.start()
    while not done.is_set():
        time.sleep(0.005)
        now = time.perf_counter()
        turns, longest, last = turns + 1, max(longest, now - last), now
    thread.join()
    assert turns > 20, f"only {turns} turns"
    assert longest < (last - began) / 2, f"{longest:.2f} s without a turn, of {last - began:.2f} s"


def few_threads(kernel: str, threads: str) -> None:
    """OMP_NUM_THREADS, which the test has set, is what the engine takes, and no more processor time than that."""
    assert tw.get_num_threads() == int(threads), tw.get_num_threads()
    call = long_call(kernel, seconds=1.0)
    began, before = time.perf_counter(), os.times()
    call()
    after, took = os.times(), time.perf_counter() - began
    used = after.user + after.system - before.user - before.system
    assert used < (int(threads) + 0.3) * took, f"{used:.2f} s of processor time in {took:.2f} s"


def odd_environment(kernel: str) -> None:
    """What OMP_NUM_THREADS says may be no number: the engine works all the same."""
    assert tw.get_num_threads() >= 1
    for call in calls(kernel):
        call()


def leaks(kernel: str) -> None:
    """A thousand calls, of ever new shapes and expressions, take no more memory than some of them."""
    rng = np.random.default_rng(0)

    def some(turns: int) -> None:
        for i in range(turns):
            q, k, v = rng.standard_normal((3, 2, 20 + i % 50, 16), dtype=np.float32)
            table = rng.standard_normal(8).astype(np.float32)
            score = tw.relative(table, grad=True) >> S * (1.0 + i)
            _both(kernel, [q, k, v], {"score": score, "mask": K % (2 + i % 7) != 0})
        gc.collect()

    some(200)
    before = _resident()
    some(800)
    grown = _resident() - before
    assert grown < 4 * 2**20, f"{grown / 2**20:.1f} MiB more after 800 calls"


def exit_at_once(kernel: str) -> None:
    """The interpreter ends right after a call."""
    for call in calls(kernel):
        call()


def exit_during_a_daemon_call(kernel: str) -> None:
    """The interpreter ends while a thread it does not wait for is inside a call."""
    call = long_call(kernel, seconds=6.0)
    threading.Thread(target=call, daemon=True).start()
    time.sleep(0.5)


def exit_during_a_call(kernel: str) -> None:
    """The interpreter ends while a thread it waits for is inside a call."""
    call = long_call(kernel, seconds=1.0)
    threading.Thread(target=call).start()
    time.sleep(0.2)


# -- what programs share ----------------------------------------------------------------------------------------------


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _check(holds: bool) -> None:
    assert holds


def _in_child(function: Callable[..., None], *args: Any) -> None:
    """Run this in a fork of the process as it is; a failure or a hang there is one here."""
    child = _fork.Process(target=function, args=args)
    child.start()
    child.join(HANG / 3)
    if child.is_alive() and child.pid is not None:
        os.kill(child.pid, signal.SIGUSR1)  # it says where it hangs
        child.join(1.0)
        child.kill()
        raise AssertionError("the child hangs")
    assert child.exitcode == 0, f"the child ended with {child.exitcode}"


def _bits_in_child(work: list[Callable[[], bytes]]) -> list[bytes]:
    """The calls' bits, without using the kernel system in this process."""
    receive, send = _fork.Pipe(duplex=False)
    child = _fork.Process(target=lambda: send.send([call() for call in work]))
    child.start()
    bits: list[bytes] = receive.recv()
    child.join()
    return bits


def _pages() -> Iterator[int]:
    yield from (int(n) * resource.getpagesize() for n in Path("/proc/self/statm").read_text().split())


def _address_space() -> int:
    return next(_pages())


def _resident() -> int:
    _, resident, *_ = _pages()
    return resident


PROGRAMS: dict[str, Callable[..., None]] = {
    f.__name__: f
    for f in (
        threads_at_once, fork_after_use, fork_during_a_call, data_loader, more_than_memory, little_memory,
        interrupted, idle, interpreter_let_go, few_threads, odd_environment, leaks, exit_at_once,
        exit_during_a_daemon_call, exit_during_a_call,
    )
}  # fmt: skip


if __name__ == "__main__":
    faulthandler.dump_traceback_later(HANG, exit=True)
    faulthandler.register(signal.SIGUSR1)
    program, *arguments = sys.argv[1:]
    PROGRAMS[program](*arguments)
    _say("ok")
    faulthandler.cancel_dump_traceback_later()
