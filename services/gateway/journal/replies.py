"""Replies of the journal's scripts, and the errors among them. Pure."""

from redis.exceptions import ResponseError

from services.gateway.journal.fenced_records import Fenced


class JournalHole(Exception):
    """Raised when Redis has less of a batch than it acknowledged, or something that nobody was answered."""


class BatchGone(JournalHole):
    """Raised when Redis has nothing of a batch."""


def judge(reply: object) -> object:
    """Return a reply, an error of a script as its type."""
    return typed(reply) if isinstance(reply, ResponseError) else reply


def typed(error: ResponseError) -> Exception:
    """Return the error of a script as its type; any other as it is."""
    for prefix, kind in (("FENCED", Fenced), ("GONE", BatchGone), ("HOLE", JournalHole)):
        if str(error).startswith(prefix):
            return kind(str(error))
    return error


def text(value: bytes | str) -> str:
    """Return a text of Redis."""
    return value.decode() if isinstance(value, bytes) else value


def number(value: bytes | str | None) -> float | None:
    """Return a number of Redis; None if there is none."""
    return float(value) if value else None
