"""Train a small transformer on one sequence that is split over ranks; its loss is that of one process.

    torchrun --nproc-per-node 2 examples/long_context.py

Each rank has a part of the words, a part from the beginning and one from the end, so that all have as much to do under
the causal mask. Only attention needs the others' keys and values; the rest of the model never knows.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tilewise as tw
from tilewise import parallel
from tilewise.nn import MultiHeadAttention

WORDS, LENGTH, FEATURES, STEPS, LAYOUT = 64, 512, 64, 10, "zigzag"


class Block(nn.Module):
    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(
            FEATURES, heads=4, heads_k=2, rope=tw.Rope(), causal=True, sinks=True, mesh=mesh, layout=LAYOUT
        )
        self.mlp = nn.Sequential(nn.Linear(FEATURES, 4 * FEATURES), nn.GELU(), nn.Linear(4 * FEATURES, FEATURES))
        self.norms = nn.ModuleList(nn.LayerNorm(FEATURES) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    """mesh: the ranks that share the sequence; None: this process has all of it."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, FEATURES)
        self.blocks = nn.Sequential(Block(mesh), Block(mesh))
        self.out = nn.Linear(FEATURES, WORDS)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        """This rank's share of the loss: the mean over all words of the sequence."""
        logits = self.out(self.blocks(self.words(words)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / LENGTH


def train(mesh: DeviceMesh | None, steps: int = STEPS) -> list[float]:
    """The loss after each step, over all ranks."""
    torch.manual_seed(0)
    text = (torch.arange(LENGTH + 1) ** 2 // 7 % WORDS)[None]
    words, labels = text[:, :-1], text[:, 1:]  # shifted before they are split: the next word may be another rank's
    model = Transformer(mesh)
    if mesh is not None:
        words, labels = (parallel.shard(x, mesh, dim=1, layout=LAYOUT) for x in (words, labels))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(words, labels)
        loss.backward()
        if mesh is not None:  # DDP and FSDP do it for a larger model, by the mean: multiply the loss by the ranks there
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=mesh.get_group())
            dist.all_reduce(loss.detach(), group=mesh.get_group())
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    if "RANK" not in os.environ:
        raise SystemExit("start it with: torchrun --nproc-per-node 2 examples/long_context.py")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    shared = train(mesh)
    if dist.get_rank() == 0:
        alone = train(None)
        for step, (ours, theirs) in enumerate(zip(shared, alone, strict=True)):
            print(f"step {step}: loss {ours:.6f} on {mesh.size()} ranks, {theirs:.6f} in one process")
        apart = max(abs(a - b) for a, b in zip(shared, alone, strict=True))
        assert apart < 1e-4, f"losses differ by {apart}"
        print(f"the same, within {apart:.1g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
