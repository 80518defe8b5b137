"""What a process of the fuzz does: it draws a seed's question, or takes one, puts it to a system, and judges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.fuzzing.drawing.draw import Wanted, draw
from tests.fuzzing.judging.exact import answer
from tests.fuzzing.question import LinearQuestion, Question
from tests.fuzzing.running import systems
from tests.fuzzing.running.asking import Unaskable, ask, ask_linear
from tests.fuzzing.running.memory import Memory
from tests.fuzzing.running.systems import System
from tests.fuzzing.running.trial import Verdict, judge

MOST_DRAWS = 100

Asked = Question | LinearQuestion


@dataclass(frozen=True)
class Put:
    """To which system which questions are put. isa: one of the engine's instruction sets, or its own choice."""

    name: str
    wanted: Wanted
    isa: str | None = None
    make: Callable[[str], System] = systems.system

    def begin(self) -> Callable[[int | Asked], Verdict]:
        """What judges seeds and questions; to be called in the process that will."""
        systems.ready(self.name)
        if self.isa is not None:
            from tilewise.kernels.cpu import library

            library.use_isa(self.isa)
        system, memory = self.make(self.name), Memory()

        def judged(item: int | Asked) -> Verdict:
            return judge_seed(system, item, memory, self.wanted) if isinstance(item, int) else judge(
                system, item, memory)  # fmt: skip

        return judged


def judge_seed(system: System, seed: int, memory: Memory, wanted: Wanted) -> Verdict:
    """The first question of a seed whose results mean something, put to the system; and why others were not."""
    redrawn = Counter[str]()
    for attempt in range(MOST_DRAWS):
        verdict = judge(system, draw(seed, wanted, attempt), memory)
        if verdict.unfit is None:
            verdict.redrawn = redrawn
            return verdict
        redrawn[verdict.unfit] += 1
    raise RuntimeError(f"seed {seed}: no call fit to judge in {MOST_DRAWS} draws: {dict(redrawn)}")


def question_of(seed: int, wanted: Wanted) -> Asked:
    """The question that judge_seed puts, without a kernel."""
    memory = Memory()
    for attempt in range(MOST_DRAWS):
        question: Any = draw(seed, wanted, attempt)
        memory.clear()
        if answer(question).unfit is None and _can_be_asked(question, memory):
            return question  # type: ignore[no-any-return]
    raise RuntimeError(f"seed {seed}: no call fit to judge in {MOST_DRAWS} draws")


def _can_be_asked(question: Asked, memory: Memory) -> bool:
    try:
        _ = ask_linear(question, memory, "cpu") if isinstance(question, LinearQuestion) else ask(
            question, memory, "cpu")  # fmt: skip
    except Unaskable:
        return False
    except (ValueError, TypeError):  # a failure that the kernel's process told of
        return True
    return True
