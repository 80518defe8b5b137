"""Before anything is sent every rank tells the others what it was called with, so that a mistake of one is told on all.

Otherwise a rank that refuses its arguments would leave the others waiting, and shards that do not fit would be summed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from tilewise.dispatch import Unsupported
from tilewise.parallel.team import PeerError, Ranks
from tilewise.sharing import Kept

_ROOM = 2048  # bytes of a rank's facts
_OWN = ("queries", "keys")  # in which ranks may differ

Facts = dict[str, Any]
_agreed: Kept[list[Facts]] = Kept(256)


def agree(ranks: Ranks, make: Callable[[], Facts], device: torch.device) -> list[Facts]:
    """The facts of every rank. An error in `make` is raised on all, as is a difference in what must be the same.

    On a GPU the host would have to wait for its answer: there ranks ask once for each kind of call.
    """
    own: Exception | None = None
    try:
        facts = make()
    except (ValueError, TypeError, Unsupported) as error:
        own, facts = error, {"error": str(error)}
    text = json.dumps(facts)
    if device.type == "cpu" or own is not None:
        told = _told(ranks, text, device)
    else:
        told = _agreed.found((ranks.groups, text), lambda: _told(ranks, text, device))
    if own is not None:
        raise own
    _check(told)
    return told


def _told(ranks: Ranks, text: str, device: torch.device) -> list[Facts]:
    data = text.encode()
    if len(data) > _ROOM:  # only an error is that long
        data = json.dumps({"error": json.loads(text)["error"][: _ROOM // 2]}).encode()
    given = torch.tensor(list(data.ljust(_ROOM)), dtype=torch.uint8, device=device)
    return [json.loads(bytes(row)) for row in ranks.gather(given).tolist()]


def _check(told: list[Facts]) -> None:
    for rank, facts in enumerate(told):
        if "error" in facts:
            raise PeerError(f"rank {rank} of the mesh refused its arguments: {facts['error']}")
    first = told[0]
    for rank, facts in enumerate(told):
        for name in sorted(facts.keys() - set(_OWN)):
            if facts[name] != first.get(name):
                raise PeerError(
                    f"{name}: expected the same on every rank of the mesh, got {first.get(name)} on rank 0 and "
                    f"{facts[name]} on rank {rank}"
                )
