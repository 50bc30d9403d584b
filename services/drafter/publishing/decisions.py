"""Decisions of publishing: the gate before it, loading, the canary after it. Pure: seconds are passed in.

Gate. Candidate and drafter in use are evaluated on the same held-out samples with the same policy, in tokens per
verification. The candidate must be better by a margin, on enough samples; the margin keeps two drafters of equal
worth from being swapped for each other. Without a drafter in use (a fresh head that was never published) the
candidate must be better than none, which makes one token per verification. After a rollback some updates pass
before anything is published again.

Canary. The gate has evaluated the drafter on held-out samples, with the policy as the learner has it. The
canary finds what that cannot show: another engine, another policy, weights that arrived broken. It compares
with the drafter before, as last reported by the instances, and condemns only what is certainly worse: the upper
end of the 99 % interval of the acceptance rate lies below `canary_collapse` times the rate before, and
verifications accept less than before. (The rate alone would condemn a better drafter that makes longer drafts.)
A lack of drafts never condemns.

A rollback takes a much larger difference than publishing; with a difference in between nothing happens, so versions
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
"""Acceptance rate below which a drafter has collapsed if nothing is known of the drafter before."""


class GateVerdict(StrEnum):
    """Outcome for a candidate."""

    PUBLISH = "publish"
    REJECT = "reject"
    WAIT = "wait"
    """It cannot be judged yet: it is neither published nor counted as rejected."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Verdict with its reason, and the gain in acceptance length as a share (0 without a drafter in use)."""

    verdict: GateVerdict
    reason: str
    gain: float = 0.0


def judge(
    candidate: float, current: float | None, rollouts: int, since_roll_back: int | None, config: DrafterConfig
) -> Judgement:
    """Judge a candidate.

    Args:
        candidate: its acceptance length on the held-out samples.
        current: acceptance length of the drafter in use on the same samples; None if there is none.
        rollouts: number of held-out samples.
        since_roll_back: updates since the last rollback; None if there was none.
        config: settings; those of the gate begin with `publish_`.
    """
    if rollouts < config.publish_samples:
        reason = f"{rollouts} held-out rollouts are too few, {config.publish_samples} needed"
        return Judgement(GateVerdict.WAIT, reason)
    if since_roll_back is not None and since_roll_back <= config.publish_cooldown:
        reason = f"update {since_roll_back} of {config.publish_cooldown} that pass after a roll-back"
        return Judgement(GateVerdict.WAIT, reason)
    # Not "candidate < bound": NaN must not pass.
    if current is None:
        if not candidate >= config.publish_first:
            reason = f"acceptance length {candidate:.3f}, the first needs {config.publish_first:.3f}"
            return Judgement(GateVerdict.REJECT, reason)
        reason = f"the first one: acceptance length {candidate:.3f}"
        return Judgement(GateVerdict.PUBLISH, reason, candidate - 1)
    gain = candidate / current - 1 if current > 0 else 0.0
    reason = f"acceptance length {candidate:.3f} on {rollouts} held-out rollouts, {current:.3f} in use"
    if not candidate >= current * (1 + config.publish_margin):
        return Judgement(GateVerdict.REJECT, f"{reason}: not better by {config.publish_margin:.1%}", gain)
    return Judgement(GateVerdict.PUBLISH, reason, gain)


class Loading(StrEnum):
    """Progress of loading a published drafter on all instances."""

    PENDING = "pending"
    LOADED = "loaded"
    REFUSED = "refused"


def judge_loading(loaded: int, refused: int, pending: int) -> Loading:
    """Judge a checkpoint by the answers of the instances.

    It is refused if at least as many instances refuse it as have loaded it or have not answered: they have read it
    and found that it is no drafter for their policy.
    """
    if refused and refused >= loaded + pending:
        return Loading.REFUSED
    return Loading.LOADED if loaded and not pending else Loading.PENDING


@dataclass(frozen=True, slots=True)
class LiveAcceptance:
    """Counts over the live drafts of one version: drafts, their tokens, and the accepted tokens."""

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
    """Result of an observation."""

    WATCHING = "watching"
    PASSED = "passed"
    COLLAPSED = "collapsed"


@dataclass(frozen=True, slots=True)
class Canary:
    """Watch over a version that was published at `since` in place of one with the acceptance `before`.

    Settings of the canary begin with `canary_`.
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
            return f"{rate}, {self.before.rate:.1%} of the version before"
        return ""
