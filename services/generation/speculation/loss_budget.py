"""Bound what wrong predictions can cost, in plain steps. Pure.

Acceptance is a guess until drafts were verified, and so is a step time that was not measured. One step that
verifies 16 useless tokens for each of 512 samples takes as long as ten plain ones. So a step may take as long as a
plain one, the credit that is left, and what its drafts are expected to bring, as far as they can be trusted. Trust
begins at nothing and follows the share of the expected tokens that were accepted, so a new kind of drafts is tried
on a part of the batch. A drafted step adds the plain steps that its tokens are worth, less those that its time is
worth, and every step adds a small share: over many steps no more than that share is lost, whatever is predicted.
"""

from __future__ import annotations

from dataclasses import dataclass

_START, _MOST, _LEAST = 0.8, 8.0, -0.3
_SHARE = 0.015
# Weight of the steps before the latest one in the trust, and the share of what is expected that counts at most.
_FADING, _TRUSTED = 0.7, 0.8
# Samples of a step whose outcome counts in full.
_ENOUGH = 8


@dataclass(slots=True)
class LossBudget:
    """Credit of speculation, in plain steps, and trust in the expected tokens, from 0 to 1.

    What was accepted may come some steps later than what was expected.
    """

    credit: float = _START
    trust: float = 0.0
    # Fading sums of expected and accepted tokens, and of the steps that expected any.
    _expected: float = 0.0
    _accepted: float = 0.0
    _steps: float = 0.0

    def seconds(self, plain: float) -> float:
        """Return the longest time of a step without expectations, if it takes `plain` seconds without drafts."""
        return plain * (1.0 + max(self.credit, 0.0))

    def token_seconds(self, plain: float, samples: int) -> float:
        """Return the time by which each expected token prolongs that."""
        return _TRUSTED * self.trust * plain / samples

    def settle(self, cost: float, samples: int, expected: float = 0.0, accepted: float = 0.0) -> None:
        """Account for a step.

        Args:
            cost: of its time, in plain steps.
            samples: of the step; of few samples the outcome says little.
            expected: tokens that were expected to be accepted of its drafts.
            accepted: tokens that became known to be accepted, of these or of earlier drafts.
        """
        fading = _FADING ** min(samples / _ENOUGH, 1.0) if expected > 0.0 else 1.0
        self._expected = fading * self._expected + expected
        self._accepted = fading * self._accepted + accepted
        self._steps = fading * self._steps + (1.0 - fading)
        kept = self._accepted / self._expected if self._expected > 0.0 else 0.0
        self.trust = self._steps * min(kept, 1.0)
        # By the share that is kept on the whole: what became of the draft of one sample is chance.
        worth = 1.0 + expected * kept / samples
        self.credit = min(max(self.credit + worth - cost + _SHARE, _LEAST), _MOST)
