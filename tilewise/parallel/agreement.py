"""Before anything is sent every rank tells the others what it was called with, so that a mistake of one is told on all.

Otherwise a rank that refuses its arguments would leave the others waiting, and shards that do not fit would be summed.
Hosts tell each other, so that no GPU is waited for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tilewise.parallel.digest import digest
from tilewise.parallel.groups import PeerError
from tilewise.parallel.mesh import Ranks

_ROOM = 4096  # bytes of a rank's facts
_WORDS = 600  # characters of an error, each of up to 6 bytes
_OWN = ("queries", "keys", "rows")  # in which ranks may differ

Facts = dict[str, Any]


class Agreement(NamedTuple):
    """What all ranks said once, and its number, the same on each."""

    number: int
    told: list[Facts]


_UNKNOWN = Agreement(0, [])
_MOST = 256
_latest: dict[Any, Agreement] = {}  # that this rank came to with the same facts of its own


def agree(ranks: Ranks, make: Callable[[], Facts]) -> list[Facts]:
    """The facts of every rank. An error in `make` is raised on all, as is a difference in what must be the same.

    Ranks whose own facts are as before first ask whether all are: then a number goes round, and no text.
    """
    own: Exception | None = None
    try:
        facts = make()
    except Exception as error:  # whatever it is, the others must not wait
        own, facts = error, {"error": str(error) or type(error).__name__}
    text = json.dumps(facts)
    known = _latest.get((ranks.groups, text), _UNKNOWN)
    if ranks.agree_on(known.number) and known is not _UNKNOWN:
        return known.told
    told = _told(ranks, text)
    if own is not None:
        raise own
    _check(told)
    if len(_latest) >= _MOST:
        _latest.clear()
    _latest[ranks.groups, text] = Agreement(digest(told), told)
    return told


def _told(ranks: Ranks, text: str) -> list[Facts]:
    data = text.encode()
    if len(data) > _ROOM:  # only an error is that long
        data = json.dumps({"error": json.loads(text)["error"][:_WORDS]}).encode()
    given = torch.tensor(list(data.ljust(_ROOM)), dtype=torch.uint8)
    return [json.loads(bytes(row)) for row in ranks.told(given).tolist()]


def _check(told: list[Facts]) -> None:
    for rank, facts in enumerate(told):
        if "error" in facts:
            raise PeerError(f"rank {rank} of the mesh refused its arguments: {facts['error']}")
    first = told[0]
    for rank, facts in enumerate(told):
        for name in (name for name in facts if name not in _OWN):  # in their order: causes before what follows
            if facts[name] != first.get(name):
                raise PeerError(
                    f"{name}: expected the same on every rank of the mesh, got {first.get(name)} on rank 0 and "
                    f"{facts[name]} on rank {rank}"
                )
