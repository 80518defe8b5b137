"""Several contenders, judged side by side: each in processes of its own, and judged by one beside each of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

from tilewise.referee.court import Introduction, Options
from tilewise.referee.features import FEATURES
from tilewise.referee.trial import Heard, Plan, Trial

Progress = Callable[[str], None]


@dataclass
class Judged:
    """Everything that was heard of a contender."""

    name: str
    introduction: Introduction
    heard: list[Heard] = field(default_factory=list)
    faults: list[Heard] = field(default_factory=list)
    is_cut: bool = False  # some calls were not asked, for want of time


def sessions(
    names: Sequence[str], options: Options, plan: Plan, jobs: int, split: int, progress: Progress
) -> Iterator[Judged]:
    """Each as soon as it is ready. split: processes that share a contender's features."""
    parts = plan.parts(split)
    if jobs == 1:
        for name in names:
            yield _merged([judged(name, options, part, progress) for part in parts])
        return
    fresh = multiprocessing.get_context("spawn")  # PyTorch's threads do not survive a fork
    with ProcessPoolExecutor(jobs, fresh, _begin, (list(sys.path),)) as pool:
        started = {name: [_start(pool, name, options, part) for part in parts] for name in names}
        owners = {future: name for name, futures in started.items() for future in futures}
        for future in as_completed(owners):  # whoever is ready is told, whatever becomes of the others
            name = owners[future]
            done = sum(x.done() for x in started.get(name, ()))
            progress(f"{name}: {done} of {len(parts)} parts")
            if done == len(parts):
                yield _merged([x.result() for x in started.pop(name)])


def _start(pool: Executor, name: str, options: Options, part: Plan) -> Future[Judged]:
    return pool.submit(_asked, name, options, part)


def _begin(path: list[str]) -> None:
    """A new process finds the same modules; at Ctrl-C it ends without a word, since the first one tells."""
    sys.path[:] = path
    signal.signal(signal.SIGINT, _leave)


def _leave(*_: object) -> None:
    os._exit(130)


def _asked(name: str, options: Options, part: Plan) -> Judged:
    """In a process of the pool, which would take the next part after Ctrl-C: it closes the contender's, and ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return judged(name, options, part)
    except KeyboardInterrupt:
        os._exit(130)
    finally:
        signal.signal(signal.SIGINT, _leave)


def judged(name: str, options: Options, plan: Plan, progress: Progress = lambda text: None) -> Judged:
    with Trial(name, options, plan, progress) as trial:
        if trial.introduction.missing is not None:
            return Judged(name, trial.introduction)
        heard, faults = trial.run()
        return Judged(name, trial.introduction, heard, faults, trial.is_cut)


def _merged(parts: Sequence[Judged]) -> Judged:
    """In the order of the features, whoever was asked for them."""
    order = {slug: i for i, slug in enumerate(FEATURES)}
    heard = sorted((x for part in parts for x in part.heard), key=lambda x: order[x.feature])
    faults = sorted((x for part in parts for x in part.faults), key=lambda x: order[x.feature])
    return Judged(parts[0].name, parts[0].introduction, heard, faults, any(x.is_cut for x in parts))
