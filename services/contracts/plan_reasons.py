"""Reasons of the decisions on engine steps, as metrics, reports and explanations name them.

Instances count their steps by these reasons, and the policy service explains the counts.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class PlanReason(StrEnum):
    """Reason of a decision: its name, True if the step verified drafts, and the reason in words."""

    drafted: bool
    words: str

    def __new__(cls, name: str, drafted: bool, words: str) -> Self:
        """Make a reason that is equal to its name."""
        reason = str.__new__(cls, name)
        reason._value_ = name
        reason.drafted, reason.words = drafted, words
        return reason

    NO_PROPOSALS = "no_proposals", False, "no drafter proposed a token"
    BACKOFF = "backoff", False, "drafters were not queried, because drafting had not paid for its overhead"
    OFF = "off", False, "speculation is switched off"
    PLAIN_IS_BEST = "plain_is_best", False, "no draft would have paid"
    WITHIN_MARGIN = "within_margin", False, "the gain was within the margin"
    DRAFTS = "drafts", True, "drafts paid"
    EXPLORED = "explored", True, "exploration: drafts that were predicted not to pay were measured"
    EXPLORED_PLAIN = "explored_plain", False, "exploration: a plain step was measured"
    FIXED = "fixed", True, "drafts of fixed length"
    ADAPTIVE = "adaptive", True, "drafts of the length that acceptance suggests"
    TOGGLED_ON = "toggled_on", True, "drafts of the given length paid"
    TOGGLED_OFF = "toggled_off", False, "drafts of the given length would not have paid"
    TABLE = "table", True, "the table has drafts for the batch"
    TABLE_PLAIN = "table_plain", False, "the table has none for the batch"

    @classmethod
    def known(cls, name: str) -> PlanReason | None:
        """Return the reason of a name; None for a name of a later version."""
        return next((each for each in cls if each == name), None)
