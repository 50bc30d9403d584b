"""Mode `adaptive`: one draft length for the batch, which follows the acceptance."""

from __future__ import annotations

from dataclasses import dataclass

from services.contracts.plan_reasons import PlanReason
from services.generation.speculation.modes import FixedMode

# Number of drafts of one length after which the length may change.
_DRAFTS = 32
# The length rises if at least the first share of the drafts was accepted whole, and falls if less than the second
# share had more tokens accepted than the next lower length has.
_RISE, _FALL = 0.5, 0.25
# Longest draft to begin with.
_FIRST = 4


@dataclass(slots=True)
class AdaptiveMode(FixedMode):
    """Mode `adaptive`: a draft length that follows the acceptance, whatever it costs.

    The length rises to the next one of the ladder where most drafts were accepted whole, and falls where few drafts
    had a token accepted that the next lower length does not have. Between the two shares it stays, so lengths do
    not alternate: where each token is accepted with the same probability p, a length L that is left upwards has p^L
    of at least a half, and one that is left downwards to L has p^(L + 1) below a quarter, which exclude each other.
    The rule needs no step times and never decodes plainly. EfficientRollout moves its length in this way between
    the steps of a run (section 4.3, here the ladder of the policy service); serving engines do so between engine
    steps.
    """

    REASONS = (PlanReason.OFF, PlanReason.ADAPTIVE)
    # Lengths of the ladder up to the draft cap, rising; only the cap if the ladder has none.
    _lengths: tuple[int, ...] = ()
    # Place of the present length; drafts counted at it, of these the ones accepted whole, and the ones of which
    # more tokens were accepted than the next lower length has.
    _place: int = 0
    _counted: int = 0
    _whole: int = 0
    _beyond: int = 0

    def __post_init__(self) -> None:
        cap = self.knobs.draft_cap
        self._lengths = tuple(each for each in self.knobs.ladder.lengths if each <= cap) or (cap,)
        self._place = max(sum(each <= _FIRST for each in self._lengths) - 1, 0)

    def length(self, samples: int, context: float) -> int:
        """Return the present draft length."""
        return self._lengths[self._place]

    def verified(self, drafted: int, accepted: int, count: int = 1) -> None:
        """Count drafts with this outcome, unless they were shorter than the length for lack of tokens."""
        length = self._lengths[self._place]
        if drafted < length:
            return
        below = self._lengths[self._place - 1] if self._place else 0
        self._counted += count
        self._whole += count * (accepted >= length)
        self._beyond += count * (accepted > below)
        if self._counted < _DRAFTS:
            return
        if self._whole >= _RISE * self._counted:
            self._place = min(self._place + 1, len(self._lengths) - 1)
        elif self._beyond < _FALL * self._counted:
            self._place = max(self._place - 1, 0)
        self._counted = self._whole = self._beyond = 0
