"""Context parallelism on torch.distributed: attention over a sequence that is split across ranks."""

from tilewise.parallel.api import attention, attention_varlen, explain
from tilewise.parallel.groups import PeerError
from tilewise.parallel.layout import Layout, contiguous, zigzag
from tilewise.parallel.needs import balanced
from tilewise.parallel.sharding import positions, replicated, shard, unshard
from tilewise.parallel.team import Traffic, count_traffic

__all__ = [
    "Layout",
    "PeerError",
    "Traffic",
    "attention",
    "attention_varlen",
    "balanced",
    "contiguous",
    "count_traffic",
    "explain",
    "positions",
    "replicated",
    "shard",
    "unshard",
    "zigzag",
]
