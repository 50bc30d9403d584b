"""Speculation on or off: whether it pays by predicted step times, after EfficientRollout (section 4.2). Pure.

On when the predicted speedup over plain decoding reaches 1 + margin (tau). With the latch the margin is not asked
for again: the batch of a step only shrinks, which only helps. The paper keeps speculation on to the end of the
rollout; here the latch ends when the batch grows, and it never overrules the model: what is predicted to be slower
than plain decoding is not done.
"""

from __future__ import annotations

from dataclasses import dataclass


def speedup(
    requests: int, expected: float, plain_seconds: float, drafted_seconds: float, draft_seconds: float = 0.0
) -> float:
    """Tokens a second with drafts over tokens a second without (equation 1 of the paper).

    Args:
        requests: samples in the step; each gives one token anyway.
        expected: draft tokens expected to be accepted, over all samples.
        plain_seconds: predicted time of the step without drafts.
        drafted_seconds: predicted time of the step that verifies them.
        draft_seconds: time to make the drafts; 0 where they cost nothing.
    """
    whole = drafted_seconds + draft_seconds
    if requests < 1 or whole <= 0.0 or plain_seconds <= 0.0:
        return 1.0
    return (requests + expected) / requests * plain_seconds / whole


@dataclass(slots=True)
class Toggle:
    """Decides step by step; `margin` >= 0 is the safety margin tau, as a share."""

    margin: float = 0.02
    latch: bool = False
    # The batch in which speculation was switched on last; 0: it is off, or nothing is latched.
    _latched: int = 0

    @property
    def latched(self) -> bool:
        """Whether the margin is not asked for."""
        return self._latched > 0

    def decide(self, requests: int, predicted: float) -> bool:
        """Whether a step of so many samples is to verify drafts of this predicted speedup."""
        if requests > self._latched:
            self._latched = 0
        on = predicted > 1.0 and predicted >= (1.0 if self._latched else 1.0 + self.margin)
        if not on:
            self._latched = 0
        elif self.latch and not self._latched:
            self._latched = requests
        return on
