"""Linear attention, an operation of its own: O(n) in time, a state of fixed size, and its own kernel systems."""

from tilewise.linear.api import linear_attention, linear_attention_vjp
from tilewise.linear.spec import LinearGrads
from tilewise.linear.state import LinearState

__all__ = ["LinearGrads", "LinearState", "linear_attention", "linear_attention_vjp"]
