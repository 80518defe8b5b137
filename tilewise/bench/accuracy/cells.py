"""What is measured: a cell (inputs of a kind, a mask, a type, a size), and its tensors, drawn on the device itself."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from tilewise.bench.gpu.cases import Case
from tilewise.cases import dominant

SCALES = {"x1": 1.0, "x4": 4.0, "x12": 12.0, "x40": 40.0}  # what normal queries are multiplied with
ONE_HOT = {"first": "first", "last": "last"}  # where a row's one key with weight comes
INPUTS = (*SCALES, *ONE_HOT)
LEARNED = ("slopes", "sinks")  # whose gradients are wanted as well
DTYPES, MASKS, HEAD_DIMS = ("bfloat16", "float16"), ("causal", "full"), (64, 128)
LENGTHS = {"cuda": (1024, 4096), "cpu": (256, 512)}
HEADS = 4
_GAP = 20.0  # between a one-hot row's score and every other


@dataclass(frozen=True)
class Cell:
    inputs: str
    mask: str
    dtype: str
    n: int  # queries and keys
    d: int
    learned: str = ""  # one of LEARNED, or none
    heads: int = HEADS

    def describe(self) -> dict[str, Any]:
        """The cell's part of a record."""
        return asdict(self)

    @property
    def case(self) -> Case:
        """As the GPU suite's contestants know it."""
        return Case(
            self.mask, self.n, self.d, backward=True, dtype=self.dtype, tokens=self.n, hidden=self.heads * self.d
        )


def cells(device: str, quick: bool = False) -> list[Cell]:
    """Those of a shape and type beside each other, for whoever compiles a kernel for each."""
    lengths = LENGTHS[device]
    if quick:
        return [Cell(x, "causal", "bfloat16", lengths[0], d) for d in HEAD_DIMS for x in INPUTS]
    plain = [
        Cell(x, mask, dtype, n, d)
        for dtype in DTYPES
        for d in HEAD_DIMS
        for mask in MASKS
        for n in lengths
        for x in INPUTS
    ]
    return [*plain, *(Cell(x, "causal", "bfloat16", lengths[0], 64, y) for y in LEARNED for x in ("x1", "x12"))]


def is_common(cell: Cell) -> bool:
    """A cell that those take part in, too, who compile for many seconds."""
    return cell.dtype == "bfloat16" and cell.n in (LENGTHS["cuda"][0], LENGTHS["cpu"][0])


# -- tensors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Drawn:
    """(1, heads, n, d) each; learned: (heads,) numbers in float32, or None."""

    q: Any
    k: Any
    v: Any
    d_out: Any
    learned: Any = None

    def leaves(self) -> tuple[Any, ...]:
        """What gets a gradient, new for each contestant."""
        inputs = (self.q, self.k, self.v, *(() if self.learned is None else (self.learned,)))
        return tuple(x.clone().requires_grad_() for x in inputs)


def draw(cell: Cell, device: str) -> Drawn:
    """The same numbers in every process of a machine."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, cell.dtype)

    def normal() -> Any:
        return torch.randn(1, cell.heads, cell.n, cell.d, generator=generator, device=device)

    q, k, v, d_out = (normal() for _ in range(4))
    k, v, d_out = k.to(dtype), v.to(dtype), d_out.to(dtype)
    if cell.inputs in ONE_HOT:
        keys = torch.from_numpy(dominant(ONE_HOT[cell.inputs], cell.n, cell.n, cell.mask == "causal")).to(device)
        q = torch.stack([_aimed(each.double(), keys) for each in k[0]])[None].to(dtype)
    else:
        q = (q * SCALES[cell.inputs]).to(dtype)
    slopes = torch.tensor([2.0 ** (-2 * (i + 1)) for i in range(cell.heads)], device=device)
    learned = {"": None, "slopes": slopes, "sinks": torch.linspace(-2, 2, cell.heads, device=device)}[cell.learned]
    return Drawn(q, k, v, d_out, learned)


def _aimed(k: Any, keys: Any) -> Any:
    """Queries of one head that point at these keys, as long as puts every other score lower by the gap."""
    scores = k[keys] @ k.T / math.sqrt(k.shape[1])
    own = scores.gather(1, keys[:, None])
    lead = own - scores.scatter(1, keys[:, None], -math.inf).amax(1, keepdim=True)
    return k[keys] * (_GAP / lead.clamp(min=1.0))  # a key that is hardly ahead of its neighbour leads by less
