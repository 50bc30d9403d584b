"""Adaptive lenience: move the l of LENIENT so that the KL that a trainer reports stays near a target. Pure.

The KL of an update grows with l, steeply and in a way that differs between algorithms and changes over a run, but
always in the same direction. The controller relies only on that. It works on log l, where the rule min(1, l *
p_now / p_then) is a shift, and on log(target / KL), so that the unit and the size of the KL do not matter:

    log l  <-  log l + clip(GAIN * log(target / KL), -LARGEST_STEP, LARGEST_STEP)

Within the dead band, l stays. The whole state is l, bounded by 1 and the ceiling, so it cannot wind up while the
target is out of reach. If the target is below the KL that the update has without reuse, l stays at 1, with the
least reuse that the rule allows.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

FLOOR = 1.0
"""The least l: the acceptance of standard speculative sampling."""
CEILING = math.exp(2.0)
"""The most l: beyond it nearly everything is reused whatever the policy has become."""
# Reported batches to remember: far more than a trainer has in flight.
_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class LenienceRules:
    """Speed and bounds of adaptation, in natural logarithms."""

    gain: float = 0.2
    """Part of the error that one report corrects. Where log KL grows by b per unit of log l, the loop is
    stable for gain * b < 2, and does not overshoot for gain * b <= 1."""
    largest_step: float = 0.2
    """Most that one report moves log l: one wild report does little harm."""
    dead_band: float = 0.1
    """|log(target / KL)| within which l stays: reports are noisy, and an error of about 10 % is acceptable."""
    ceiling: float = math.log(CEILING)
    """Most log l."""


DEFAULT_RULES = LenienceRules()


def next_lenience(
    lenience: float, kl: float | None, target: float, rules: LenienceRules = DEFAULT_RULES
) -> float:
    """Return the l of the next batch, after the report of a KL (nats per token) of a batch with the l `lenience`.

    A KL that is absent, not a number, infinite or negative carries no information: l stays. ValueError if
    `lenience` is not finite and >= 1 or `target` is not finite and > 0.
    """
    if not FLOOR <= lenience < math.inf:
        raise ValueError(f"lenience must be finite and >= 1, got {lenience}")
    if not 0 < target < math.inf:
        raise ValueError(f"the KL target must be finite and > 0, got {target}")
    if kl is None or not 0 <= kl < math.inf:
        return lenience
    # A KL of 0 is infinitely far below the target, so the step has its largest size, whatever the gain.
    error = math.log(target) - math.log(kl) if kl > 0 else math.inf
    if abs(error) <= rules.dead_band:
        return lenience
    step = max(-rules.largest_step, min(rules.largest_step, rules.gain * error))
    # The ceiling limits only increases: an l that begins above it must not jump.
    if step > 0 and math.log(lenience) + step > rules.ceiling:
        return max(lenience, math.exp(rules.ceiling))
    return max(FLOOR, lenience * math.exp(step))


@dataclass(frozen=True, slots=True)
class RunLenience:
    """The l of a run's next batch, and the batches whose reports it includes, the latest last."""

    lenience: float
    reported: tuple[str, ...] = ()

    def after(self, batch_id: str, kl: float, target: float) -> RunLenience:
        """Return the lenience after the report of another batch; itself if that batch was reported before."""
        if batch_id in self.reported:
            return self
        reported = (*self.reported, batch_id)[-_REMEMBERED:]
        return RunLenience(next_lenience(self.lenience, kl, target), reported)

    def to_json(self) -> str:
        """Serialise for Redis."""
        return json.dumps({"lenience": self.lenience, "reported": self.reported})

    @classmethod
    def from_json(cls, text: str | bytes) -> RunLenience:
        """Parse the result of `to_json`."""
        kept = json.loads(text)
        return cls(float(kept["lenience"]), tuple(kept["reported"]))
