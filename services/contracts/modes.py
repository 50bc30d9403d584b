"""Registry of the modes of speculation: their names, and the class of each. No other place has a list of them.

Knobs, settings and the simulator take the names from here; an instance imports the class when a step uses the mode.
Experiments did not beat `planner` over all cells of bench/policy. They are kept for comparison, and are never the
default. Instances count their steps by the reasons of decisions (`PlanReason`), and the policy service explains the
counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pkgutil import resolve_name
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field

_CORE, _EXPERIMENTS = "services.generation.speculation.modes", "services.generation.experiments"


@dataclass(frozen=True, slots=True)
class RegisteredMode:
    """A mode by name; `place` is its class, a `Mode`, as `module:class`, and `words` say what it verifies."""

    name: str
    place: str
    words: str

    def load(self) -> Any:
        """Import and return the class."""
        return resolve_name(self.place)


MODES: Mapping[str, RegisteredMode] = {
    each.name: each
    for each in (
        RegisteredMode("planner", f"{_CORE}:PlannerMode", "as many tokens as pay, over the whole batch"),
        RegisteredMode(
            "fixed", f"{_CORE}:FixedMode", "the best proposal of each sample, up to the draft cap"
        ),
        RegisteredMode(
            "toggle", f"{_EXPERIMENTS}.modes:ToggleMode", "as fixed, in the steps in which it pays"
        ),
        RegisteredMode(
            "adaptive",
            f"{_EXPERIMENTS}.modes:AdaptiveMode",
            "the best proposals, up to a length that follows what is accepted",
        ),
        RegisteredMode(
            "solver",
            f"{_EXPERIMENTS}.modes:SolverMode",
            "the best proposals, up to the length that a table has for the batch",
        ),
    )
}
"""Modes by name."""
OFF = "off"
"""Setting of an instance that never speculates, whatever the knobs say."""


def _checked(mode: str, allowed: Collection[str]) -> str:
    if mode not in allowed:
        raise ValueError(f"{mode!r} is no mode; there are {', '.join(allowed)}")
    return mode


def _known(mode: str) -> str:
    return _checked(mode, MODES)


def _known_or_off(mode: str) -> str:
    return _checked(mode, (*MODES, OFF))


ModeName = Annotated[str, AfterValidator(_known), Field(json_schema_extra={"enum": [*MODES]})]
ModeOrOff = Annotated[str, AfterValidator(_known_or_off), Field(json_schema_extra={"enum": [*MODES, OFF]})]


def described() -> str:
    """Return the modes with their words, for help texts."""
    return "; ".join(f"{each.name}: {each.words}" for each in MODES.values())


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
