"""Mode `adaptive`: a draft length that follows what is accepted, whatever it costs.

The length of a batch is one of a given set. It rises to the next where most drafts were accepted whole, and falls
where few drafts had any token accepted that the length below does not have. Between the two shares it stays, so
lengths do not alternate: where each token is accepted with the same probability p, a length L that is left upwards
has p^L of at least a half, and one that is left downwards to L has p^(L + 1) below a quarter, which exclude each
other.

The rule needs no step times and never decodes plainly. EfficientRollout moves its length so between the steps of a
run (section 4.3, here the ladder of the policy service); serving engines do between engine steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.generation.speculation.modes.decision import PlanReason
from services.generation.speculation.modes.fixed import FixedMode

# Drafts of the present length after which it is decided on.
_DRAFTS = 32
# Share accepted whole from which the length rises, and share that used more than the length below under which it
# falls.
_RISE, _FALL = 0.5, 0.25
# Longest draft to begin with.
_FIRST = 4


@dataclass(slots=True)
class AdaptiveMode(FixedMode):
    """Drafts of the length of the ladder that acceptance suggests."""

    REASONS = (PlanReason.OFF, PlanReason.ADAPTIVE)
    # Those of the ladder up to the draft cap, rising. Where there is none, the cap is the only one.
    _lengths: tuple[int, ...] = ()
    # Place in the lengths; drafts that were counted at it, those accepted whole, and those beyond the length below.
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

    def verified(self, drafted: int, accepted: int) -> None:
        """Count the outcome of a draft; one that is shorter than the length, for lack of tokens, says nothing."""
        length = self._lengths[self._place]
        if drafted < length:
            return
        below = self._lengths[self._place - 1] if self._place else 0
        self._counted += 1
        self._whole += accepted >= length
        self._beyond += accepted > below
        if self._counted < _DRAFTS:
            return
        if self._whole >= _RISE * self._counted:
            self._place = min(self._place + 1, len(self._lengths) - 1)
        elif self._beyond < _FALL * self._counted:
            self._place = max(self._place - 1, 0)
        self._counted = self._whole = self._beyond = 0
