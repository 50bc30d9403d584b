"""Decide whether to publish a candidate, whether instances refuse it, and whether to roll it back. Pure.

A rollback takes a much larger difference than publishing. With a difference in between nothing happens, so versions
do not oscillate.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import sqrt

from services.drafter.config import DrafterConfig

_Z = 2.576
"""Quantile of the two-sided 99 % interval."""
_LEAST_RATE = 0.02
"""Acceptance rate below which a drafter has collapsed if nothing is known of the previous one."""


class GateVerdict(StrEnum):
    """Verdict of the gate on a candidate."""

    PUBLISH = "publish"
    REJECT = "reject"
    WAIT = "wait"
    """Too early to judge: neither published nor counted as rejected."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Verdict with its reason, and the relative gain in acceptance length (0 without a drafter in use)."""

    verdict: GateVerdict
    reason: str
    gain: float = 0.0


def gate_verdict(
    candidate: float, current: float | None, rollouts: int, since_roll_back: int | None, config: DrafterConfig
) -> Judgement:
    """Judge a candidate before it is published.

    Candidate and drafter in use are evaluated on the same held-out samples with the same policy, in tokens per
    verification. The candidate must be better by a margin, on enough samples; the margin keeps two equally good
    drafters from replacing each other. Without a drafter in use (a fresh head that was never published) the
    candidate must be better than no drafter, whose acceptance length is 1. After a rollback nothing is published
    for some updates.

    Args:
        candidate: its acceptance length on the held-out samples.
        current: acceptance length of the drafter in use on the same samples; None if there is none.
        rollouts: number of held-out samples.
        since_roll_back: updates since the last rollback; None if there was none.
        config: the gate's settings begin with `publish_`.
    """
    if rollouts < config.publish_samples:
        reason = f"{rollouts} held-out rollouts are too few, {config.publish_samples} needed"
        return Judgement(GateVerdict.WAIT, reason)
    if since_roll_back is not None and since_roll_back <= config.publish_cooldown:
        reason = f"update {since_roll_back} of {config.publish_cooldown} in the cooldown after a rollback"
        return Judgement(GateVerdict.WAIT, reason)
    # Not "candidate < bound": NaN must not pass.
    if current is None:
        if not candidate >= config.publish_first:
            reason = f"acceptance length {candidate:.3f}; the first drafter needs {config.publish_first:.3f}"
            return Judgement(GateVerdict.REJECT, reason)
        reason = f"first drafter: acceptance length {candidate:.3f}"
        return Judgement(GateVerdict.PUBLISH, reason, candidate - 1)
    gain = candidate / current - 1 if current > 0 else 0.0
    reason = f"acceptance length {candidate:.3f} on {rollouts} held-out rollouts, {current:.3f} in use"
    if not candidate >= current * (1 + config.publish_margin):
        return Judgement(GateVerdict.REJECT, f"{reason}: not better by {config.publish_margin:.1%}", gain)
    return Judgement(GateVerdict.PUBLISH, reason, gain)


def is_refused(loaded: int, refused: int, pending: int) -> bool:
    """Return True if instances refuse a checkpoint: at least as many as have loaded it or have not answered.

    An instance only refuses a checkpoint that it has read and that is no drafter for its policy.
    """
    return refused > 0 and refused >= loaded + pending


@dataclass(frozen=True, slots=True)
class LiveAcceptance:
    """Number of live drafts of one version, of their tokens, and of the accepted tokens."""

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0

    def __add__(self, other: LiveAcceptance) -> LiveAcceptance:
        return LiveAcceptance(
            self.drafts + other.drafts, self.tokens + other.tokens, self.accepted + other.accepted
        )

    @property
    def rate(self) -> float:
        """Acceptance rate: accepted tokens divided by drafted ones; 0 without any."""
        return self.accepted / self.tokens if self.tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification, the policy's own included."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def highest_rate(self) -> float:
        """Upper end of Wilson's 99 % interval of the acceptance rate."""
        if not self.tokens:
            return 1.0
        n, p = self.tokens, self.rate
        centre = p + _Z**2 / (2 * n)
        spread = _Z * sqrt(p * (1 - p) / n + _Z**2 / (4 * n * n))
        return min(1.0, (centre + spread) / (1 + _Z**2 / n))


class CanaryStatus(StrEnum):
    """State of a canary after an observation."""

    WATCHING = "watching"
    PASSED = "passed"
    COLLAPSED = "collapsed"


@dataclass(frozen=True, slots=True)
class Canary:
    """Watch over a version that was published at `since` in place of one with the acceptance `before`.

    The gate has evaluated the drafter on held-out samples, with the policy as the learner has it. The canary finds
    problems that the gate cannot see: another engine, another policy, weights that arrived broken. It compares with
    the previous drafter, as last reported by the instances, and condemns only a drafter that is certainly worse:
    the upper end of the 99 % interval of its acceptance rate lies below `canary_collapse` times the previous rate,
    and its acceptance length is lower as well. (The rate alone would condemn a better drafter that makes longer
    drafts.) A lack of drafts never condemns.

    The canary's settings begin with `canary_`.
    """

    version: int
    before: LiveAcceptance
    since: float
    config: DrafterConfig

    def observe(self, live: LiveAcceptance, now: float) -> tuple[CanaryStatus, str]:
        """Judge the live drafts of this version so far. Returns the status and its reason."""
        if reason := self._collapsed(live):
            return CanaryStatus.COLLAPSED, reason
        if live.tokens >= self.config.canary_tokens:
            return CanaryStatus.PASSED, f"{live.rate:.1%} of {live.tokens} live draft tokens are accepted"
        if now - self.since >= self.config.canary_seconds:
            reason = f"{live.tokens} live draft tokens in {now - self.since:.0f} s do not condemn it"
            return CanaryStatus.PASSED, reason
        return CanaryStatus.WATCHING, ""

    def _collapsed(self, live: LiveAcceptance) -> str:
        least_tokens = self.config.canary_least_tokens
        if live.tokens < least_tokens:
            return ""
        rate = f"{live.rate:.1%} of {live.tokens} live draft tokens are accepted"
        if self.before.tokens < least_tokens:
            return f"{rate}, less than {_LEAST_RATE:.1%}" if live.highest_rate < _LEAST_RATE else ""
        bound = self.config.canary_collapse * self.before.rate
        if live.highest_rate < bound and live.acceptance_length < self.before.acceptance_length:
            return f"{rate}; {self.before.rate:.1%} of the previous version"
        return ""
