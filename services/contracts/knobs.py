"""Knobs of speculation: their types and ranges, their scopes, and the precedence of settings. Pure.

A setting is a partial object of knobs that belongs to a scope. The knobs of an instance are its own
configuration, overlaid by the settings of the fleet, its model and its pool, and for the samples of a run by
that run's: the narrower scope wins, knob by knob. The kill switch is the exception: speculation that is off for
a wider scope is off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from paceline.errors import Violation
from services.contracts.errors import InvalidArgument

Mode = Literal["fixed", "adaptive", "solver", "toggle", "planner"]
ScopeKind = Literal["fleet", "model", "pool", "run"]
KINDS: tuple[ScopeKind, ...] = ("fleet", "model", "pool", "run")
"""Kinds of scope, widest first."""
MOST_DRAFTED = 128
"""Largest draft cap."""
_MAX_NAME = 256


class LadderKnobs(BaseModel):
    """Adaptive draft length at step boundaries (see services.policy.ladder)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    on: bool = False
    """True if the ladder moves the draft cap."""
    lengths: tuple[int, ...] = (1, 2, 4, 6, 8, 12, 16)
    """Draft caps of the rungs, ascending; also the draft lengths of mode adaptive."""
    up: float = Field(default=0.94, gt=0, le=1)
    """Block efficiency, as a share of its ceiling, from which the draft cap rises."""
    down: float = Field(default=0.85, ge=0, lt=1)
    """Share up to which the draft cap falls."""
    patience: int = Field(default=2, ge=1, le=1000)
    """Consecutive steps that must agree before the draft cap moves."""

    @field_validator("lengths")
    @classmethod
    def _ascending(cls, lengths: tuple[int, ...]) -> tuple[int, ...]:
        if not lengths or len(lengths) > 32:
            raise ValueError("needs 1 to 32 lengths")
        if lengths[0] < 1 or lengths[-1] > MOST_DRAFTED or any(a >= b for a, b in pairwise(lengths)):
            raise ValueError(f"must be ascending, from 1 to {MOST_DRAFTED}")
        return lengths

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.down >= self.up:
            raise ValueError("down must be below up")
        return self


class DrafterKnobs(BaseModel):
    """Switches of the drafters of an instance; a drafter that is off makes no proposals."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reference: bool = True
    suffix: bool = True
    quantized: bool = True
    eagle3: bool = True


class Knobs(BaseModel):
    """All knobs, with their defaults; lengths are in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    mode: Mode = "planner"
    """fixed: the best proposal of each sample, up to draft_cap tokens. toggle: that, in the steps in which it pays.
    adaptive: the length of the ladder that acceptance suggests. solver: a draft length for each batch size, from a
    table. planner: as many tokens over the whole batch as pay."""
    speculation: bool = True
    """Kill switch: false means plain decoding."""
    draft_cap: int = Field(default=16, ge=1, le=MOST_DRAFTED)
    """Most draft tokens of a sample in a step."""
    margin: float = Field(default=0.02, ge=0, le=10)
    """Least predicted gain over plain decoding, as a share, for which toggle and planner verify drafts."""
    latch: bool = False
    """Once speculation pays by the margin, the margin is not required again until the batch grows."""
    ladder: LadderKnobs = LadderKnobs()
    drafters: DrafterKnobs = DrafterKnobs()


Setting = Mapping[str, Any]
"""Some of the knobs, as JSON values; nested objects are overlaid knob by knob, too."""


@dataclass(frozen=True, slots=True)
class KnobScope:
    """Scope of a setting. The fleet has no name; every other scope has one."""

    kind: ScopeKind = "fleet"
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" if self.name else self.kind

    @property
    def key(self) -> str:
        """Unique name among all scopes."""
        return f"{self.kind}:{self.name}"

    @classmethod
    def of_key(cls, key: str) -> KnobScope:
        """Return the scope with this `key`; ValueError if it is none."""
        kind, colon, name = key.partition(":")
        for known in KINDS:
            if known == kind and colon and bool(name) == (kind != "fleet"):
                return cls(known, name)
        raise ValueError(f"{key!r} names no scope")

    @classmethod
    def of_request(cls, run_id: str = "", model: str = "", pool: str = "") -> KnobScope:
        """Return the scope that a request names: at most one of its fields is set; none for the fleet.

        Raises:
            InvalidArgument: several are set, or a name is too long.
        """
        named: tuple[tuple[ScopeKind, str], ...] = (("run", run_id), ("model", model), ("pool", pool))
        given = [KnobScope(kind, name) for kind, name in named if name]
        if len(given) > 1:
            fields = ", ".join(_FIELDS[each.kind] for each in given)
            raise InvalidArgument([Violation(fields, "only one of run_id, model and pool can be set")])
        for each in given:
            if len(each.name) > _MAX_NAME:
                raise InvalidArgument(
                    [Violation(_FIELDS[each.kind], f"is longer than {_MAX_NAME} characters")]
                )
        return given[0] if given else KnobScope()


_FIELDS = {"fleet": "", "model": "model", "pool": "pool", "run": "run_id"}


def check(setting: Setting) -> dict[str, Any]:
    """Return a setting with its values converted to their types, without defaults.

    Raises:
        InvalidArgument: an unknown knob, or a value that is not allowed; the field names it.
    """
    try:
        checked = Knobs.model_validate(overlaid(Knobs().model_dump(), setting))
    except ValidationError as error:
        raise InvalidArgument([_violation(each) for each in error.errors()]) from error
    return _only(checked.model_dump(mode="json"), setting)


def resolved(base: Knobs, settings: Sequence[Setting]) -> Knobs:
    """Return the base with checked settings over it, widest scope first.

    Each setting is valid by itself; where two are incompatible (a ladder's `up` below another's `down`), the
    incompatible knobs of the narrower scope are ignored.
    """
    knobs = base
    for setting in settings:
        wider = knobs.speculation
        try:
            knobs = Knobs.model_validate(overlaid(knobs.model_dump(), setting))
        except ValidationError:
            knobs = _one_by_one(knobs, setting)
        if not wider:
            knobs = knobs.model_copy(update={"speculation": False})
    return knobs


def capped(knobs: Knobs, ladder_cap: int | None) -> Knobs:
    """Return the knobs with the draft cap that a run's ladder has reached; None: it has none.

    They are the same object where that changes nothing.
    """
    cap = knobs.draft_cap if ladder_cap is None else max(1, min(knobs.draft_cap, ladder_cap))
    return knobs if cap == knobs.draft_cap else knobs.model_copy(update={"draft_cap": cap})


def merged(settings: Sequence[Setting]) -> dict[str, Any]:
    """Return the settings of several scopes as one, widest scope first."""
    whole: dict[str, Any] = {}
    for setting in settings:
        whole = overlaid(whole, setting)
    if any(setting.get("speculation") is False for setting in settings):
        whole["speculation"] = False
    return whole


def _one_by_one(knobs: Knobs, setting: Setting) -> Knobs:
    for name, value in setting.items():
        try:
            knobs = Knobs.model_validate(overlaid(knobs.model_dump(), {name: value}))
        except ValidationError:
            continue
    return knobs


def overlaid(under: Setting, over: Setting) -> dict[str, Any]:
    """Return two settings as one; `over` takes precedence."""
    merged = dict(under)
    for name, value in over.items():
        below = merged.get(name)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[name] = overlaid(below, value) if both else value  # type: ignore[arg-type]
    return merged


def changes(before: Setting, after: Setting, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the knobs that differ, by dotted name, with their values before and after; None: not set."""
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if all(each is None or isinstance(each, Mapping) for each in (old, new)):
            yield from changes(old or {}, new or {}, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name}", old, new


def _only(values: Mapping[str, Any], wanted: Setting) -> dict[str, Any]:
    return {
        name: _only(values[name], value) if isinstance(values[name], Mapping) else values[name]
        for name, value in wanted.items()
    }


def _violation(error: Any) -> Violation:
    name = ".".join(["knobs", *map(str, error["loc"])])
    if error["type"] == "extra_forbidden":
        return Violation(name, f"is no knob; there are {', '.join(Knobs.model_fields)}")
    return Violation(name, str(error["msg"]).removeprefix("Value error, "))
