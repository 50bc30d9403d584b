"""For whom a call is made: the runs that this caller may name, and how much it may have in work.

A service that calls on behalf of somebody, as the HTTP facade does, says so in the metadata `x-paceline-caller`. A
server believes that of services alone. The caller of the call that is being served is a context variable, so that
what a caller may see is known wherever an answer is put together.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import re
from contextvars import ContextVar
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from paceline.channel import ON_BEHALF
from paceline.errors import Violation
from paceline.foreign_json import parse_json
from paceline.tokens import MOST_PATTERN_CHARACTERS, MOST_PATTERNS, NAME_PATTERN, RUN_PATTERN
from services.contracts.errors import InvalidArgument, PermissionDenied

LONGEST_RUN_ID = 256
"""Longest run id that anything accepts; a longer one is of no grant."""


class TokenHolder(BaseModel):
    """Holder of a token, with the bounds on what is done for it."""

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
    """Most unfinished samples at once, waiting or running. Unset: what the gateway takes."""
    max_queued_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens that these samples may come to: prompt and `max_tokens` of each. Unset: no limit."""

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        if sum(map(len, self.runs or ())) > MOST_PATTERN_CHARACTERS:
            raise ValueError(f"runs: the patterns have more than {MOST_PATTERN_CHARACTERS} characters in all")
        return self

    def may_name(self, run_id: str) -> bool:
        """Return True if the run is one of the caller's; "" is none."""
        if self.runs is None:
            return True
        return 0 < len(run_id) <= LONGEST_RUN_ID and _pattern_of(self.runs).fullmatch(run_id) is not None

    def check_run(self, run_id: str) -> None:
        """Raise PermissionDenied for a run that is not the caller's, whether or not there is such a run."""
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
        """Return the run of a request that names none: `default`, or the first that a pattern names in full."""
        if self.may_name(default):
            return default
        named = (pattern for pattern in self.runs or () if not set("*?") & set(pattern))
        return next(named, default)

    def metadata(self) -> str:
        """Return what a service sends along for this caller."""
        return _encoded(self.name, self.runs, self.max_queued_samples, self.max_queued_tokens)


_current: ContextVar[TokenHolder | None] = ContextVar("caller", default=None)


def current_caller() -> TokenHolder | None:
    """Return the caller of the call that is served; None: a service, or anybody where no token is required."""
    return _current.get()


def act_for(caller: TokenHolder | None) -> None:
    """Do what follows in this task for a caller, the calls of other services included."""
    _current.set(caller)
    ON_BEHALF.set("" if caller is None else caller.metadata())


def may_see(run_id: str) -> bool:
    """Return True if what is of a run, or of the whole fleet (empty), may be shown to the current caller."""
    caller = _current.get()
    return caller is None or not run_id or caller.may_name(run_id)


@functools.lru_cache(maxsize=1024)
def read_caller(metadata: str) -> TokenHolder:
    """Return the caller that a service names. InvalidArgument if that is none."""
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
    # In ASCII, as metadata are.
    return json.dumps({key: value for key, value in values.items() if value is not None})
