"""Times of steps of the same samples by their draft tokens, compiled."""

from services.policy.curve.curve import Curve, Curves, warm_up

__all__ = ["Curve", "Curves", "warm_up"]
