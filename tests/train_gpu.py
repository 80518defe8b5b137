"""A small transformer trained twice from the same seed, on the same bytes: do gradients train as they should?

    python tests/train_gpu.py results/gpu/training.json --plot results/gpu/training.png
    python tests/train_gpu.py results/gpu/training.json --plot results/gpu/training.png --draw    # nothing is trained

Once attention is tilewise's, in bfloat16, forward and backward by the kernel that is named; once it is PyTorch's math
backend in float32. Both see the words of this repository. The losses must follow each other.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

if __name__ == "__main__":  # the project's folder, not the script's own, where `cuda` is something else
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import tilewise as tw
from tilewise.bench import plot_parts
from tilewise.bench.machine import describe
from tilewise.bench.revision import revision
from tilewise.cli.terminal import progress

ROOT = Path(__file__).resolve().parent.parent
MOST_APART = 0.02  # of the loss, in the mean of some steps
MEAN_OF = 20

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Size:
    layers: int = 4
    heads: int = 4
    d: int = 64
    context: int = 512
    batch: int = 16

    @property
    def features(self) -> int:
        return self.heads * self.d


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.size, self.attend = size, attend
        self.before, self.between = nn.LayerNorm(size.features), nn.LayerNorm(size.features)
        self.qkv, self.out = nn.Linear(size.features, 3 * size.features), nn.Linear(size.features, size.features)
        self.mlp = nn.Sequential(
            nn.Linear(size.features, 4 * size.features), nn.GELU(), nn.Linear(4 * size.features, size.features)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.before(x)).unflatten(-1, (3, self.size.heads, self.size.d)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(*heads).transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class Model(nn.Module):  # type: ignore[misc]
    """The next byte."""

    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(256, size.features), nn.Embedding(size.context, size.features)
        self.blocks = nn.Sequential(*(Block(size, attend) for _ in range(size.layers)))
        self.last, self.out = nn.LayerNorm(size.features), nn.Linear(size.features, 256)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.out(self.last(self.blocks(self.words(text) + self.places(places))))


def by_tilewise(kernel: str) -> Attend:
    """Half precision: the bits that tensor cores take."""

    def attend(*heads: Tensor) -> Tensor:
        q, k, v = (x.bfloat16().contiguous() for x in heads)
        return tw.attention(q, k, v, causal=True, kernel=kernel).float()

    return attend


def by_math(*heads: Tensor) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return nn.functional.scaled_dot_product_attention(*heads, is_causal=True)


def text_of_repository() -> Tensor:
    pages = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "tilewise").rglob("*.py")])
    return torch.frombuffer(bytearray(b"\n".join(page.read_bytes() for page in pages)), dtype=torch.uint8).long()


def train(attend: Attend, size: Size, steps: int, device: str, what: str) -> list[float]:
    """The loss of each step."""
    torch.manual_seed(0)
    model, text = Model(size, attend).to(device), text_of_repository().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    starts = torch.randint(
        len(text) - size.context - 1, (steps, size.batch), generator=torch.Generator().manual_seed(1)
    )
    losses = []
    for step in range(steps):
        progress(f"{what}: step {step + 1} of {steps}")
        rows = starts[step].to(device)[:, None] + torch.arange(size.context + 1, device=device)
        words = text[rows]
        loss = nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    progress()
    return [float(loss) for loss in losses]


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference of their means over some steps, as a share."""
    a, b = (torch.tensor(x).unfold(0, min(MEAN_OF, len(x)), 1).mean(-1) for x in (one, other))
    return float(((a - b).abs() / b).max())


def plot(told: dict[str, Any], path: Path) -> None:
    figure = plot_parts.new_figure(7, 4)
    axis = figure.subplots()
    for (name, curve), style in zip(told["losses"].items(), ("-", "--"), strict=True):
        axis.plot(range(1, len(curve) + 1), curve, style, label=name)
    axis.set_xlabel("step")
    axis.set_ylabel("loss")
    axis.legend()
    plot_parts.save(figure, path, told, dpi=100)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="where the losses go, as JSON")
    parser.add_argument("--kernel", default="cuda/forward_sm90", help="as tw.attention takes it")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--plot", type=Path, help="a picture of both")
    parser.add_argument("--draw", action="store_true", help="draw the losses that the file has, and no more")
    options = parser.parse_args(arguments)
    if options.draw:
        plot(json.loads(options.results.read_text()), options.plot)
        return 0
    size = Size() if options.device != "cpu" else Size(layers=1, heads=2, d=16, context=32, batch=2)
    names = {f"tilewise {options.kernel}, bfloat16": by_tilewise(options.kernel), "PyTorch math, float32": by_math}
    losses = {name: train(attend, size, options.steps, options.device, name) for name, attend in names.items()}
    off = apart(*losses.values())
    options.results.parent.mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {
        "machine": describe(options.device), "source": revision(), "steps": options.steps, "apart": off,
        "losses": losses,
    }  # fmt: skip
    options.results.write_text(json.dumps(told, indent=1) + "\n")
    if options.plot is not None:
        plot(told, options.plot)
    first, last = ({name: curve[i] for name, curve in losses.items()} for i in (0, -1))
    print(f"first {first}, last {last}; {off:.2%} apart, at most {MOST_APART:.0%} may be")
    return 0 if off <= MOST_APART else 1


if __name__ == "__main__":
    sys.exit(main())
