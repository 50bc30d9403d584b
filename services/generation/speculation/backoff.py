"""Back off from drafting when it does not pay for its own overhead. Pure.

Querying drafters and planning run on the host while the engine waits; the step-time model does not include this
cost. `DraftBackoff` keeps a credit, in steps: each drafted step adds (predicted savings / overhead) - 1. While the
credit is negative, drafting is skipped for exponentially more steps, up to 32, until the batch shrinks, new drafts
arrive, or a drafted step pays again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

# Drafted steps without any savings before steps are skipped: a lone sample often has a few between two good
# drafts.
_MAX_CREDIT = 8.0
_MIN_CREDIT = -6.0
# Skipped steps in a row, reached at _MIN_CREDIT.
_MAX_SKIPPED = 32
# A batch that shrank to this share is another batch, in which drafting may pay.
_SHRUNK = 0.5


@dataclass(slots=True)
class DraftBackoff:
    """Adaptive backoff: says step by step whether drafters are queried."""

    _credit: float = _MAX_CREDIT
    _to_skip: int = 0
    _num_samples: int = 0

    def should_draft(self, num_samples: int) -> bool:
        """Return True if drafters should be queried for the next step, else count it as skipped."""
        if self._to_skip and num_samples >= _SHRUNK * self._num_samples:
            self._to_skip -= 1
            return False
        return True

    def record_drafted_step(self, num_samples: int, saved: float, overhead: float = 0.0) -> None:
        """Account for a step for which drafters were queried.

        Args:
            num_samples: samples of the step.
            saved: predicted seconds that its drafts save over plain decoding; 0 without drafts, infinite if
                there is no prediction.
            overhead: seconds that querying and planning took.
        """
        worth = 0.0 if saved <= 0.0 else saved / overhead if overhead > 0.0 else inf
        # A profitable step clears accumulated debt.
        before = max(self._credit, 0.0) if worth >= 1.0 else self._credit
        self._credit = max(min(before - 1.0 + worth, _MAX_CREDIT), _MIN_CREDIT)
        self._to_skip = 0 if self._credit >= 0.0 else min(_MAX_SKIPPED, round(2 ** (-self._credit - 1.0)))
        self._num_samples = num_samples

    def reset(self) -> None:
        """Start over with full credit, because drafters know something new."""
        self._credit, self._to_skip = _MAX_CREDIT, 0

    def draft_next(self) -> None:
        """Skip no further step, because a sample with a reference joined; the credit stays."""
        self._to_skip = 0
