"""PTX as a list of instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass

_GUARDED = re.compile(r"(?:@(!?)(%?\w+)\s+)?(\S+)\s*(.*)")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(\w+)(?:\[(\d+)\])?")
_SIZES = {"b8": 1, "u32": 4, "f32": 4, "b32": 4, "u64": 8, "b64": 8}


@dataclass(frozen=True)
class Instruction:
    name: str
    operands: tuple[str, ...]
    guard: str | None = None  # a predicate without which nothing is done,
    negated: bool = False  # or with which


@dataclass(frozen=True)
class Program:
    instructions: list[Instruction]
    labels: dict[str, int]
    parameters: dict[str, int]  # sizes in bytes, in order
    threads: int  # of a block


def parse(text: str) -> Program:
    """Of a file with one kernel, as compilers write it: a line each, or more."""
    head, _, body = re.sub(r"//[^\n]*", "", text).partition(".entry")[2].partition("\n{")
    parameters = {name: int(count or 1) * _SIZES[kind] for kind, name, count in _PARAMETER.findall(head)}
    made = Program([], {}, parameters, int(re.findall(r"\.reqntid\s+(\d+)", head)[0]))
    scope, opened, begun = "", 0, ""
    for line in (line.strip() for line in body.splitlines()):
        if line in ("{", "}") and not begun:  # names within are its own; they are not nested
            opened += line == "{"
            scope = f"@{opened}" if line == "{" else ""
        elif line.endswith(":"):
            made.labels[line[:-1] + ("" if line.startswith("$") else scope)] = len(made.instructions)
        elif line and not line.startswith("."):
            begun = f"{begun} {line}".strip()
            if begun.endswith(";"):
                made.instructions.append(_instruction(begun[:-1], scope))
                begun = ""
    return made


def _instruction(line: str, scope: str) -> Instruction:
    negated, guard, name, rest = _GUARDED.fullmatch(line).groups()  # type: ignore[union-attr]
    operands = tuple(_scoped(x, scope) for x in _OPERAND.findall(rest))
    return Instruction(name, operands, _scoped(guard, scope) if guard else None, negated == "!")


def _scoped(name: str, scope: str) -> str:
    """Names without a sign are those of the braces around, if there are any."""
    return name + scope if scope and re.fullmatch(r"[A-Za-z_]\w*", name) else name
