"""Speculation on or off: whether it pays by predicted step times, after EfficientRollout (section 4.2). Pure.

On when the predicted speedup over plain decoding reaches 1 + margin (tau). With the latch the margin is not asked
for again: the batch of a step only shrinks, which only helps. The paper keeps speculation on to the end of the
rollout; here the latch ends when the batch grows, and it never overrules the model: what is predicted to be slower
than plain decoding is not done.

`Promotion` is ReSpec's state machine (section 5.2) for drafters with state of their own.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, field


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


class Phase(enum.Enum):
    """Where a drafter with state of its own stands."""

    PLAIN = "plain"
    """It has no state, and drafts nothing."""
    PROMOTING = "promoting"
    """State is being rebuilt; requests that have theirs draft already."""
    SPECULATING = "speculating"
    LEAVING = "leaving"
    """Its state is to be dropped."""


@dataclass(frozen=True, slots=True)
class Work:
    """What the drafter is to do before the coming step: requests to build state for, and to drop it of."""

    build: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()


@dataclass(slots=True)
class Promotion:
    """A drafter's state, as far as anybody needs it.

    Promoting a running batch means to run the drafter's prefill over what was decoded without it. That is done for
    requests that will use it only, and for at most `per_step` of them with one step, so that no step becomes long.
    """

    per_step: int = 8
    phase: Phase = Phase.PLAIN
    built: set[str] = field(default_factory=set)

    def advance(self, wanted: bool, running: Collection[str], users: Collection[str]) -> Work:
        """One step further.

        Args:
            wanted: the toggle says that drafting with it pays.
            running: every request in the engine; state of others is gone with them.
            users: those of them that are to draft with it.
        """
        gone = self.built.difference(running)
        self.built -= gone
        if not wanted:
            return self._leave(gone)
        missing = [each for each in users if each not in self.built]
        building = tuple(missing[: self.per_step])
        self.built.update(building)
        self.phase = Phase.PROMOTING if len(missing) > len(building) else Phase.SPECULATING
        return Work(building, tuple(sorted(gone)))

    def ready(self, request: str) -> bool:
        """Whether a request can draft with it now."""
        return request in self.built and self.phase in (Phase.PROMOTING, Phase.SPECULATING)

    def _leave(self, gone: Collection[str]) -> Work:
        dropped = tuple(sorted({*self.built, *gone}))
        self.built.clear()
        self.phase = Phase.LEAVING if dropped and self.phase is not Phase.PLAIN else Phase.PLAIN
        return Work((), dropped)
