"""Identify the caller of a request, and check the runs that the request names.

A service that calls on behalf of a caller, as the HTTP facade does, names it in the metadata `x-paceline-caller`;
servers ignore that from anyone but services. The caller of the current call is a context variable, so that every
part of an answer can be checked against it.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import re
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Annotated, Self

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from pydantic import BaseModel, ConfigDict, Field, model_validator

from paceline.errors import Violation
from paceline.files import parse_json
from paceline.tokens import MOST_PATTERN_CHARACTERS, MOST_PATTERNS, NAME_PATTERN, RUN_PATTERN
from paceline.transport.channel import ON_BEHALF
from services.contracts.errors import InvalidArgument, PermissionDenied

LONGEST_RUN_ID = 256
"""Longest run id that is accepted anywhere; no grant covers a longer one."""
FIELDS = frozenset({"run_id", "run_ids"})
"""Fields that name runs, at any depth of a request, so that new RPCs are checked without further code."""
WITHOUT_RUN = {
    "paceline.v1.RolloutService/ListBatches": "lists the batches of all runs that the caller may name",
    "paceline.v1.RolloutService/Generate": "generates a sample of no run, which is not kept",
    "paceline.v1.FleetService/WatchDecisions": "reports the fleet, and all runs that the caller may name",
    "paceline.v1.FleetService/GetKnobs": "knobs of the fleet, a model or a pool",
    "paceline.v1.FleetService/SetKnobs": "knobs of the fleet, a model or a pool",
}
"""Methods whose request may omit the run, and what that means; elsewhere no pattern allows that."""


class TokenHolder(BaseModel):
    """Holder of a token, with its permissions and limits."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    """Name of the owner, which errors and logs show instead of the token."""
    runs: (
        Annotated[
            tuple[Annotated[str, Field(pattern=RUN_PATTERN)], ...],
            Field(min_length=1, max_length=MOST_PATTERNS),
        ]
        | None
    ) = None
    """Runs that it may name: `*` stands for any characters, `?` for one. Unset: any run."""
    max_queued_samples: Annotated[int, Field(ge=1)] | None = None
    """Most unfinished samples at once, waiting or running. Unset: the gateway's own limit."""
    max_queued_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of these samples together: prompt and `max_tokens` of each. Unset: no limit."""

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        if sum(map(len, self.runs or ())) > MOST_PATTERN_CHARACTERS:
            raise ValueError(f"runs: the patterns have more than {MOST_PATTERN_CHARACTERS} characters in all")
        return self

    def may_name(self, run_id: str) -> bool:
        """Return True if the caller may name the run; "" is no run."""
        if self.runs is None:
            return True
        return 0 < len(run_id) <= LONGEST_RUN_ID and _pattern_of(self.runs).fullmatch(run_id) is not None

    def check_run(self, run_id: str) -> None:
        """Raise PermissionDenied for a run that is not the caller's, whether or not it exists."""
        if self.may_name(run_id):
            return
        patterns = ", ".join(self.runs or ())
        raise PermissionDenied(
            f"the token of {self.name} is not for the run {run_id[:140]!r}; it is for {patterns}",
            "RUN_NOT_GRANTED",
            run=run_id,
            patterns=patterns,
            token=self.name,
        )

    def run_or(self, default: str) -> str:
        """Return the run of a request that names none: `default`, or the first run that a pattern names in full."""
        if self.may_name(default):
            return default
        named = (pattern for pattern in self.runs or () if not set("*?") & set(pattern))
        return next(named, default)

    def metadata(self) -> str:
        """Return the metadata with which a service names this caller."""
        return _encoded(self.name, self.runs, self.max_queued_samples, self.max_queued_tokens)


_current: ContextVar[TokenHolder | None] = ContextVar("caller", default=None)


def current_caller() -> TokenHolder | None:
    """Return the caller of the call being served; None: a service, or any caller if no token is required."""
    return _current.get()


def act_for(caller: TokenHolder | None) -> None:
    """Let the rest of this task act for a caller, including its calls of other services."""
    _current.set(caller)
    ON_BEHALF.set("" if caller is None else caller.metadata())


def may_see(run_id: str) -> bool:
    """Return True if the current caller may see data of a run, or, if empty, of the whole fleet."""
    caller = _current.get()
    return caller is None or not run_id or caller.may_name(run_id)


@functools.lru_cache(maxsize=1024)
def read_caller(metadata: str) -> TokenHolder:
    """Return the caller that a service names; InvalidArgument if the metadata name none."""
    try:
        return TokenHolder.model_validate(parse_json(metadata))
    except ValueError:
        raise InvalidArgument([Violation("x-paceline-caller", "names no caller")]) from None


@functools.lru_cache(maxsize=1024)
def _pattern_of(runs: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, runs)))


@functools.lru_cache(maxsize=1024)
def _encoded(name: str, runs: tuple[str, ...] | None, samples: int | None, tokens: int | None) -> str:
    values = {"name": name, "runs": runs, "max_queued_samples": samples, "max_queued_tokens": tokens}
    # ASCII, since metadata must be.
    return json.dumps({key: value for key, value in values.items() if value is not None})


def check_runs(caller: TokenHolder, method: str, request: object) -> None:
    """Raise PermissionDenied if a request names a run that the caller may not name."""
    if caller.runs is None or not isinstance(request, Message):
        return
    for run_id in runs_named(request):
        if run_id or method.removeprefix("/") not in WITHOUT_RUN:
            caller.check_run(run_id)


def runs_named(message: Message) -> Iterator[str]:
    """Yield the runs that a message names; "" for an unset field."""
    own, nested = _places(message.DESCRIPTOR)
    for name, repeated in own:
        value = getattr(message, name)
        if repeated:
            yield from value
        else:
            yield value
    for name, repeated, is_map in nested:
        value = getattr(message, name)
        if is_map:
            value = value.values()
        elif not repeated:
            value = (value,) if message.HasField(name) else ()
        for each in value:
            yield from runs_named(each)


@functools.cache
def _places(
    descriptor: Descriptor,
) -> tuple[tuple[tuple[str, bool], ...], tuple[tuple[str, bool, bool], ...]]:
    """Return the fields of a message that name runs, and the fields whose messages may."""
    own, nested = [], []
    for field in descriptor.fields:
        if field.name in FIELDS:
            own.append((field.name, field.is_repeated))
            continue
        inner, is_map = field.message_type, False
        if inner is not None and inner.GetOptions().map_entry:
            is_map = True
            inner = inner.fields_by_name["value"].message_type
        if inner is not None and _holds_runs(inner, frozenset()):
            nested.append((field.name, field.is_repeated, is_map))
    return tuple(own), tuple(nested)


def _holds_runs(descriptor: Descriptor, above: frozenset[str]) -> bool:
    if descriptor.full_name in above:
        return False
    above |= {descriptor.full_name}
    return any(
        field.name in FIELDS or (field.message_type is not None and _holds_runs(field.message_type, above))
        for field in descriptor.fields
    )
