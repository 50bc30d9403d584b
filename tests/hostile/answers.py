"""Attacks as data: how one is sent, and which answers are right; and answers as they were read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from google.rpc import error_details_pb2, status_pb2

if TYPE_CHECKING:
    from tests.hostile.rig import Rig

CLOSED = "closed"
"""Status of an answer that is the end of the connection."""
FAILED = "failed"
"""Status of an attack that could not be sent, or whose answer could not be read: right for none."""
UNANSWERED = "unanswered"
"""Status of what was neither answered nor closed in time."""


@dataclass(frozen=True)
class Answer:
    """What an attacker got."""

    status: str
    """HTTP's number, the name of gRPC's code, `CLOSED` or `UNANSWERED`."""
    message: str = ""
    field: str = ""
    """The first field at fault, if one is named."""
    reason: str = ""
    untyped: str = ""
    """What the answer lacks to be a typed one; empty if nothing."""
    to: str = ""
    """Which of the requests of an attack it answers, where there are several."""

    def __str__(self) -> str:
        found = f"{self.to} {self.status} {self.reason} {self.field}: {self.message[:300]}"
        return f"{found} [untyped: {self.untyped}]" if self.untyped else found


@dataclass(frozen=True)
class Expected:
    """The answers that are right: what is not listed is a failure."""

    statuses: frozenset[str]
    fields: tuple[str, ...] = ()
    """Beginnings of the field's name, one of which it has; none: any."""
    words: tuple[str, ...] = ()
    """Parts of the message, one of which it has; none: any."""
    typed: bool = True
    """Whether an error has a body or details. Not what HTTP or gRPC itself refuses."""

    def faults(self, answer: Answer) -> list[str]:
        """Return what is wrong with an answer."""
        found = []
        if answer.status not in self.statuses:
            found.append(f"status {answer.status} is none of {', '.join(sorted(self.statuses))}")
        if answer.status in ("200", "OK", CLOSED):
            return found
        if self.typed and answer.untyped:
            found.append(f"it is not typed: {answer.untyped}")
        if self.fields and not answer.field.startswith(self.fields):
            found.append(f"field {answer.field!r} is none of {', '.join(self.fields)}")
        if self.words and not any(word in answer.message for word in self.words):
            found.append(f"the message names none of {', '.join(self.words)}")
        return found


def either(*statuses: int | str, **more: Any) -> Expected:
    """Return what is expected: one of these statuses."""
    return Expected(frozenset(map(str, statuses)), **more)


@dataclass(frozen=True)
class Attack:
    """One attack, as it is sent in the suite and in the soak."""

    name: str
    section: str
    """Of the list of findings that it was found by."""
    send: Callable[[Rig, int], Sequence[Answer]]
    """Sends it in a size and returns all that was answered."""
    expected: Expected
    short: int = 1
    """Its size in the suite; 0: it is sent in the soak alone."""
    whole: int = 1
    """Its size in the soak."""

    def __str__(self) -> str:
        return f"{self.section}-{self.name}".replace(" ", "-")

    def faults(self, answers: Sequence[Answer]) -> list[str]:
        """Return what is wrong with the answers."""
        found = [f"{answer}: {fault}" for answer in answers for fault in self.expected.faults(answer)]
        return found if answers else ["there is no answer at all"]


def http_answer(status: int, headers: Any, body: bytes, to: str = "") -> Answer:
    """Return an answer over HTTP."""
    if status < 400:
        return Answer(str(status), body[:200].decode(errors="replace"), to=to)
    try:
        error = json.loads(body)["error"]
        message, field, reason = error["message"], error["param"] or "", error["code"]
    except (ValueError, KeyError, TypeError):
        return Answer(str(status), body[:200].decode(errors="replace"), untyped="no error in JSON", to=to)
    lacks = [name for name in ("message", "type", "code") if not error.get(name)]
    lacks += [] if headers.get("x-request-id") else ["x-request-id"]
    return Answer(str(status), str(message), str(field), str(reason), ", ".join(lacks), to)


def grpc_answer(error: grpc.RpcError | None, to: str = "") -> Answer:
    """Return how a call ended; None: well."""
    if error is None:
        return Answer("OK", to=to)
    call: Any = error
    trailer = dict(call.trailing_metadata() or ())
    raw = trailer.get("grpc-status-details-bin")
    name, message = call.code().name, call.details() or ""
    if raw is None:
        return Answer(name, message, untyped="no google.rpc.Status", to=to)
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status_pb2.Status.FromString(raw).details:
        if not detail.Unpack(info):
            detail.Unpack(bad)
    field = bad.field_violations[0].field if bad.field_violations else ""
    lacks = [] if info.reason else ["reason"]
    if name == "INVALID_ARGUMENT" and not field:
        lacks.append("field")
    return Answer(name, message, field, info.reason, ", ".join(lacks), to)
