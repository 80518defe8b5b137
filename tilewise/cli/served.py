"""Which kernels `auto` takes on a GPU, as `tilewise doctor` prints it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilewise import dispatch
from tilewise.choosing import Purpose
from tilewise.cli import UserError
from tilewise.cli.terminal import table
from tilewise.generations import AMD, GENERATIONS
from tilewise.kernels import gpus
from tilewise.spec import Attention, Shape

HEAD_DIM = 64
DTYPES = {"half precision": "bfloat16", "float32": "float32"}


def imagined(arch: str) -> tuple[str, str]:
    """The device name of a GPU that is not here, and what is said of it."""
    name = arch.removesuffix("a").removesuffix("f")
    about = AMD.get(arch)
    if name in GENERATIONS:
        about = f"{GENERATIONS[name].name} ({GENERATIONS[name].gpus})"
        arch = name
    if about is None:
        raise UserError(f"--arch: expected one of {', '.join((*GENERATIONS, *AMD))}, got {arch!r}")
    return gpus.imagined(arch), f"{arch}, {about}, if everything is installed"


def table_of(device: str, about: str) -> str:
    """A row a purpose, a column a type; below it, what is slow and how the orders are known."""
    made = [[_choice(device, purpose, dtype) for dtype in DTYPES.values()] for purpose in Purpose]
    rows = [(choices[0].purpose.value, *(choice.taken or "-" for choice in choices)) for choices in made]
    every = [choice for choices in made for choice in choices]
    told = f"{about}: kernels at head dimension {HEAD_DIM}"
    return "\n".join([told, "", table(("", *DTYPES), rows), "", *_notes(every)])


def _choice(device: str, purpose: Purpose, dtype: str) -> dispatch.Choice:
    """Of a call of any size: batches and lengths do not decide."""
    backward = purpose is Purpose.BACKWARD
    shape = Shape(1, 8, 8, 128, 128, HEAD_DIM, HEAD_DIM, dtype, device, backward=backward)
    return dispatch.choice("auto", Attention(1.0), shape, purpose)


def _notes(made: Sequence[dispatch.Choice]) -> Iterator[str]:
    slow: dict[str, list[str]] = {}
    for choice in made:
        if choice.slowness is not None:
            told = slow.setdefault(f"{choice.taken}: {choice.slowness}", [])
            told.append(f"{choice.purpose.value} in {choice.dtype}")
    yield from (f"slow: {', '.join(where)} by {told}" for told, where in slow.items())
    origins = dict.fromkeys(choice.row.origin for choice in made if choice.row is not None)
    yield f"The order of kernels: {'; '.join(origins)}. tw.explain(q, k, v, ...) shows it for a call."
