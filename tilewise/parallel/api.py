"""The public calls: shards in, this rank's part of the result out. DTensors go in and come out as such.

torch.compile leaves them to Python, as what is sent depends on what ranks tell each other; it compiles what is around.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewise.parallel import dtensors, front
from tilewise.parallel.cost import Explanation
from tilewise.parallel.front import Arguments
from tilewise.parallel.layout import Layout
from tilewise.rope import Rope


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mesh: Any = None,
    causal: bool = False,
    mask: Any = None,
    score: Any = None,
    scale: float | None = None,
    sinks: Any = None,
    rope: Rope | None = None,
    layout: str | Layout = "contiguous",
    method: str = "auto",
    kernel: str = "auto",
    return_lse: bool = False,
) -> Any:
    """Attention over a sequence that is split across ranks: this rank's part of what `tw.attention` gives of the whole.

    q, k, v: this rank's shards, tensors as `tw.attention` takes them, or DTensors, which lie split along the sequence
    over a mesh. mesh: a DeviceMesh of one dimension, or of two, (sequence, heads), or a process group: of a mesh that
    shares data too, the part that shares the sequence, mesh["context"]. Every rank of it makes the same call, and its
    backward pass, or none does.
    layout: how the sequence was split, as parallel.shard has it.
    method: "ring" (keys and values travel from rank to rank while the last ones are computed with), "gather" (each rank
    gets all that it needs at once, which may be the whole sequence's), "heads" (heads in exchange for rows), "mix"
    (heads among neighbours, a ring of those), or "auto", the quickest that parallel.explain finds, of those that hold a
    few ranks' keys at most, or little.

    Positions are those of the whole sequence, and so are the arrays that mask and score read, the same on every rank;
    keys that no query of a rank sees are not sent to it. A rope's positions are shards, as q and k are.
    Gradients of q, k and v are those of the sum of all ranks' losses; those of arrays and sinks this rank's share, as
    for any parameter that every rank has: add them up, as parallel.replicated(x, mesh) does. DDP and FSDP take their
    mean, so multiply the loss by the ranks there, or let each take its own mean if all have as many rows.
    """
    options = {"causal": causal, "mask": mask, "score": score, "scale": scale, "sinks": sinks, "rope": rope}
    return _attend(Arguments(q, k, v, None, mesh, layout, method, kernel, options), return_lse)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    lengths_q: Any,
    lengths_k: Any,
    *,
    mesh: Any = None,
    causal: bool = False,
    mask: Any = None,
    score: Any = None,
    scale: float | None = None,
    sinks: Any = None,
    rope: Rope | None = None,
    layout: str | Layout = "contiguous",
    method: str = "auto",
    kernel: str = "auto",
    return_lse: bool = False,
) -> Any:
    """The same for packed sequences, (rows, heads, d): the pack is split, wherever sequences in it begin and end.

    lengths_q, lengths_k: cumulative lengths of the whole pack, as `tw.attention_varlen` takes them.
    """
    options = {"causal": causal, "mask": mask, "score": score, "scale": scale, "sinks": sinks, "rope": rope}
    lengths = lengths_q, lengths_k
    return _attend(Arguments(q, k, v, lengths, mesh, layout, method, kernel, options), return_lse)


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    mesh: Any = None,
    causal: bool = False,
    mask: Any = None,
    score: Any = None,
    scale: float | None = None,
    sinks: Any = None,
    rope: Rope | None = None,
    layout: str | Layout = "contiguous",
    method: str = "auto",
    kernel: str = "auto",
) -> Explanation:
    """What `attention` would do with these arguments, and what each method would send, hold and take. Print it.

    Every rank of the mesh makes the call, as ranks tell each other the sizes of their shards.
    """
    options = {"causal": causal, "mask": mask, "score": score, "scale": scale, "sinks": sinks, "rope": rope}
    made = front.prepare(Arguments(q, k, v, None, mesh, layout, method, kernel, options))
    return Explanation(made.taken, made.costs, made.machine, made.ranks.size, made.shape)


def _attend(given: Arguments, return_lse: bool) -> Any:
    out, lse = (dtensors.like(given.q, x, given.dim) for x in front.run(front.prepare(given)))
    return (out, lse) if return_lse else out
