"""Watches the acceptance of a drafter on live traffic after it was swapped in. Pure: times are passed in (seconds).

The gate has measured it on held-out rollouts with the policy as the learner has it. The canary finds what that
cannot see: another engine, another policy, weights that arrived broken. It compares with the drafter before, as
the instances last told of it, and condemns only what is certainly worse: the upper end of the 99 % interval of
the acceptance rate lies below `collapse` times the rate before, and verifications accept less than before. (The
rate alone would condemn a better drafter that is given longer drafts to make.) So it never condemns for want of
drafts.

Going back takes a much larger difference than publishing does: in between nothing happens, so versions do not
swing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import sqrt

_Z = 2.576
"""Of the two-sided 99 % interval."""


@dataclass(frozen=True, slots=True)
class Live:
    """What became of the drafts of one version: how many, their tokens, and those accepted."""

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0

    def __add__(self, other: Live) -> Live:
        return Live(self.drafts + other.drafts, self.tokens + other.tokens, self.accepted + other.accepted)

    @property
    def rate(self) -> float:
        """Accepted tokens as a share of those drafted."""
        return self.accepted / self.tokens if self.tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens a verification, the policy's own included."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def highest_rate(self) -> float:
        """Upper end of Wilson's 99 % interval of the rate."""
        if not self.tokens:
            return 1.0
        n, p = self.tokens, self.rate
        centre = p + _Z**2 / (2 * n)
        spread = _Z * sqrt(p * (1 - p) / n + _Z**2 / (4 * n * n))
        return min(1.0, (centre + spread) / (1 + _Z**2 / n))


@dataclass(frozen=True, slots=True)
class CanaryRules:
    """`collapse`: share of the rate before below which a drafter has collapsed. `least_rate`: the rate below which
    one has, where nothing is known of the one before. `least_tokens`: drafted tokens of either side below which
    nothing is said. `tokens` and `seconds`: the canary ends after so many drafted tokens, or so long."""

    collapse: float = 0.6
    least_rate: float = 0.02
    least_tokens: int = 64
    tokens: int = 8192
    seconds: float = 600.0


class Watch(StrEnum):
    """What the canary says."""

    WATCHING = "watching"
    PASSED = "passed"
    COLLAPSED = "collapsed"


@dataclass(frozen=True, slots=True)
class Canary:
    """A version that was swapped in at `since`; `before`: the version that it replaced."""

    version: int
    before: Live
    since: float
    rules: CanaryRules

    def observe(self, live: Live, now: float) -> tuple[Watch, str]:
        """What the drafts of this version so far say, and why."""
        if reason := self._collapsed(live):
            return Watch.COLLAPSED, reason
        if live.tokens >= self.rules.tokens:
            return Watch.PASSED, f"{live.rate:.1%} of {live.tokens} live draft tokens are accepted"
        if now - self.since >= self.rules.seconds:
            return (
                Watch.PASSED,
                f"{live.tokens} live draft tokens in {now - self.since:.0f} s do not condemn it",
            )
        return Watch.WATCHING, ""

    def _collapsed(self, live: Live) -> str:
        if live.tokens < self.rules.least_tokens:
            return ""
        said = f"{live.rate:.1%} of {live.tokens} live draft tokens are accepted"
        if self.before.tokens < self.rules.least_tokens:
            floor = self.rules.least_rate
            return f"{said}, less than {floor:.1%}" if live.highest_rate < floor else ""
        bound = self.rules.collapse * self.before.rate
        if live.highest_rate < bound and live.acceptance_length < self.before.acceptance_length:
            return f"{said}, {self.before.rate:.1%} of the version before"
        return ""
