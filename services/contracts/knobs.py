"""Define the knobs of speculation and the statistics of its steps, and convert them to messages. Pure.

A setting is a partial object of knobs that belongs to a scope. An instance starts from the knobs of its
configuration, overlaid by the settings of the fleet, its model and its pool, and, for the samples of a run, by the
run's setting. The narrower scope wins, knob by knob, but speculation that is off for a wider scope stays off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise, zip_longest
from typing import Annotated, Any, Literal, Self

from google.protobuf.unknown_fields import UnknownFieldSet
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from paceline.convert.fleet import knobs_from_proto, knobs_to_proto
from paceline.errors import Violation
from paceline.internal.v1 import policy_pb2 as pb
from paceline.times import duration, seconds_of
from paceline.v1 import knobs_pb2
from services.contracts.drafters import NAME, OWN, registered
from services.contracts.errors import InvalidArgument
from services.contracts.modes import ModeName, described

ScopeKind = Literal["fleet", "model", "pool", "run"]
KINDS: tuple[ScopeKind, ...] = ("fleet", "model", "pool", "run")
"""Kinds of scope, widest first."""
MOST_DRAFTED = 128
"""Largest draft cap."""
MOST_COUNTED = 16
"""Longest draft length that has a separate count; longer drafts are counted with it."""
StepKey = tuple[str, int]
"""(run_id, step)"""
_MAX_NAME = 256
_FIELDS = {"fleet": "", "model": "model", "pool": "pool", "run": "run_id"}
"""Field of a request that names a scope of a kind."""


class LadderKnobs(BaseModel):
    """Adaptive draft length at step boundaries (see services.policy.steps)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    on: bool = False
    """True if the ladder moves the draft cap."""
    lengths: tuple[int, ...] = (1, 2, 4, 6, 8, 12, 16)
    """Draft caps of the rungs, ascending; also the draft lengths of mode adaptive."""
    up: float = Field(default=0.94, gt=0, le=1)
    """Block efficiency, as a share of its ceiling, at which the draft cap rises."""
    down: float = Field(default=0.85, ge=0, lt=1)
    """Share at or below which the draft cap falls."""
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
    """Switches of drafters by name; a drafter that is off makes no proposals, and one that is not named is on."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[Annotated[str, Field(pattern=NAME)], bool] = Field(init=False)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        return dict.fromkeys(OWN, True) | given if isinstance(given, dict) else given

    def on(self, drafter: str) -> bool:
        """Return True if the drafter of this name may propose."""
        return (self.__pydantic_extra__ or {}).get(drafter, True)


class Knobs(BaseModel):
    """All knobs, with their defaults; lengths are in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    mode: ModeName = Field(default="planner", description=f"Drafts that a step verifies. {described()}.")
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
        """Return the scope with this `key`; ValueError if there is none."""
        kind, colon, name = key.partition(":")
        for known in KINDS:
            if known == kind and colon and bool(name) == (kind != "fleet"):
                return cls(known, name)
        raise ValueError(f"{key!r} names no scope")

    @classmethod
    def of_request(cls, run_id: str = "", model: str = "", pool: str = "") -> KnobScope:
        """Return the scope that a request names by one of these fields, or the fleet if none is set.

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


def check(setting: Setting) -> dict[str, Any]:
    """Return a setting with its values converted to their types, without defaults.

    A drafter that is not known here is accepted: another process may have it.

    Raises:
        InvalidArgument: an unknown knob, or a value that is not allowed; the field names it.
    """
    try:
        checked = Knobs.model_validate(overlaid(Knobs().model_dump(), setting))
    except ValidationError as error:
        raise InvalidArgument([_violation(each) for each in error.errors()]) from error
    return _only(checked.model_dump(mode="json"), setting)


def check_drafters(setting: Setting, reported: Collection[str] = ()) -> None:
    """Check that the drafters of a checked setting are registered here, or reported by an instance.

    Raises:
        InvalidArgument: a drafter is not known, probably misspelled.
    """
    named = setting.get("drafters", {}).keys() - OWN.keys() - set(reported)
    if named and (unknown := named - registered().keys()):
        known = ", ".join(sorted({*registered(), *reported}))
        raise InvalidArgument(
            [
                Violation(f"knobs.drafters.{name}", f"no instance has this drafter; there are {known}")
                for name in sorted(unknown)
            ]
        )


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

    Without a change they are the same object.
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


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts of verifications, and of the tokens drafted and accepted in them."""

    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_lengths: tuple[int, ...] = ()
    """Verifications by number of draft tokens, from 0 to `MOST_COUNTED`, which includes all longer ones."""
    accepted_lengths: tuple[int, ...] = ()
    """Verifications by number of accepted tokens."""

    @property
    def block_efficiency(self) -> float:
        """Tokens per verification: accepted + 1; 1 without any verification."""
        return 1.0 + self.accepted / self.verifications if self.verifications else 1.0

    @property
    def fullness(self) -> float:
        """Block efficiency over its ceiling, in [0, 1]; 1 if nothing was drafted."""
        ceiling = self.drafted + self.verifications
        return (self.accepted + self.verifications) / ceiling if ceiling else 1.0

    def plus(self, other: Acceptance, sign: int = 1) -> Acceptance:
        """Return the sum of both, or their difference if `sign` is -1."""
        return Acceptance(
            self.verifications + sign * other.verifications,
            self.drafted + sign * other.drafted,
            self.accepted + sign * other.accepted,
            _sums(self.drafted_lengths, other.drafted_lengths, sign),
            _sums(self.accepted_lengths, other.accepted_lengths, sign),
        )

    __add__ = plus


def _sums(one: tuple[int, ...], other: tuple[int, ...], sign: int) -> tuple[int, ...]:
    return tuple(a + sign * b for a, b in zip_longest(one, other, fillvalue=0))


@dataclass(slots=True)
class StepTotals:
    """Sums over the engine steps in which samples of a training step decoded. Times are in seconds.

    `reasons` counts engine steps by the reason of their plan, `predicted_gain` sums (predicted speedup over plain
    decoding) - 1, `drafts` has the acceptance of each drafter, and `lacking_steps` counts the engine steps with
    samples that the index of the suffix drafter had no room for.
    """

    reasons: Counter[str] = field(default_factory=Counter)
    planned_tokens: int = 0
    expected_tokens: float = 0.0
    predicted_gain: float = 0.0
    predicted_seconds: float = 0.0
    measured_seconds: float = 0.0
    drafts: dict[str, Acceptance] = field(default_factory=dict)
    mode: str = ""
    lacking_steps: int = 0

    @property
    def engine_steps(self) -> int:
        """Number of engine steps."""
        return sum(self.reasons.values())

    @property
    def acceptance(self) -> Acceptance:
        """Acceptance of all drafters together."""
        return sum(self.drafts.values(), Acceptance())

    def plus(self, other: StepTotals, sign: int = 1) -> StepTotals:
        """Return the sum of both, or their difference if `sign` is -1."""
        reasons = Counter(self.reasons)
        for reason, count in other.reasons.items():
            reasons[reason] += sign * count
        nothing = Acceptance()
        return StepTotals(
            +reasons,
            self.planned_tokens + sign * other.planned_tokens,
            self.expected_tokens + sign * other.expected_tokens,
            self.predicted_gain + sign * other.predicted_gain,
            self.predicted_seconds + sign * other.predicted_seconds,
            self.measured_seconds + sign * other.measured_seconds,
            {
                name: self.drafts.get(name, nothing).plus(other.drafts.get(name, nothing), sign)
                for name in sorted({*self.drafts, *other.drafts})
            },
            self.mode or other.mode,
            self.lacking_steps + sign * other.lacking_steps,
        )


def setting_of(message: knobs_pb2.Knobs, field: str = "knobs") -> dict[str, Any]:
    """Return the knobs that a message sets, unchecked.

    Raises:
        InvalidArgument: the message sets knobs that only later versions of this service have. Ignoring them
            would report a change that was not made.
    """
    for part in (message, message.ladder, message.drafters):
        unknown = UnknownFieldSet(part)
        if numbers := [unknown[place].field_number for place in range(len(unknown))]:
            raise InvalidArgument(
                [Violation(field, f"sets knobs that this service does not know (field numbers {numbers})")]
            )
    return knobs_from_proto(message)


def apply_request(
    revision: int, shared: Setting, runs: Mapping[str, Setting], caps: Mapping[str, int]
) -> pb.ApplyKnobsRequest:
    """Return the request that applies knobs on an instance."""
    request = pb.ApplyKnobsRequest(revision=revision, knobs=knobs_to_proto(shared), run_caps=dict(caps))
    for run_id, setting in runs.items():
        request.runs[run_id].CopyFrom(knobs_to_proto(setting))
    return request


def tallies(messages: Iterable[pb.StepTally]) -> Iterator[tuple[StepKey, StepTotals]]:
    """Yield the steps of a report with their totals."""
    for message in messages:
        drafts = {
            each.drafter: Acceptance(
                each.verifications,
                each.drafted,
                each.accepted,
                tuple(each.drafted_lengths),
                tuple(each.accepted_lengths),
            )
            for each in message.drafts
        }
        totals = StepTotals(
            Counter(dict(message.reasons)),
            message.planned_tokens,
            message.expected_tokens,
            message.predicted_gain,
            seconds_of(message.predicted_time),
            seconds_of(message.measured_time),
            drafts,
            message.mode,
            message.lacking_steps,
        )
        yield (message.run_id, message.step), totals


def tally_message(key: StepKey, totals: StepTotals) -> pb.StepTally:
    """Return the message of a step's totals."""
    return pb.StepTally(
        run_id=key[0],
        step=key[1],
        reasons=dict(totals.reasons),
        planned_tokens=totals.planned_tokens,
        expected_tokens=totals.expected_tokens,
        predicted_gain=totals.predicted_gain,
        predicted_time=duration(totals.predicted_seconds),
        measured_time=duration(totals.measured_seconds),
        drafts=[
            pb.DraftTally(drafter=name, **asdict(acceptance)) for name, acceptance in totals.drafts.items()
        ],
        mode=totals.mode,
        lacking_steps=totals.lacking_steps,
    )
