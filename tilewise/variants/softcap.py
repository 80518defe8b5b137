"""A soft cap: scores are squeezed smoothly into (-cap, cap)."""

from tilewise.expr import Expr, S, tanh
from tilewise.variants._checks import positive


def softcap(cap: float) -> Expr:
    """cap * tanh(S / cap). The picture shows scores from -4 to 4 times the cap.

    >>> print(picture(softcap(1.0), 1, 8, s=np.linspace(-4, 4, 8)))
    ░ ░ ░ ░ █ █ █ █
    """
    cap = positive("softcap", "cap", cap)
    return cap * tanh(S / cap)
