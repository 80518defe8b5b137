"""A soft cap: scores are squeezed smoothly into (-cap, cap)."""

from tilewise.expr import Expr, S, tanh
from tilewise.variants._checks import positive


def softcap(cap: float) -> Expr:
    """cap * tanh(S / cap). The picture shows a score from -3 to 3 times the cap, key by key.

    ░ ░ ▒ ▓ █ █
    """
    cap = positive("softcap", "cap", cap)
    return cap * tanh(S / cap)
