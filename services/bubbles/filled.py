"""Times in which instances pre-generated, for the decision log. Pure: times are passed in (unix seconds)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.platform.redis.decision_log import DecisionRecord

KIND = "pregeneration"
"""Kind of the decision-log entry of such times."""
MOST = 256
"""Most times in one entry."""
# What begins so soon after an end goes on.
_PAUSE = 0.05
# What lasts for longer is told in parts.
_LONGEST = 10.0


class FilledSpan(NamedTuple):
    """Time in which an instance had something to pre-generate."""

    instance_id: str
    begin: float
    end: float


@dataclass(slots=True)
class _OpenSpan:
    begin: float
    heard: float
    end: float | None = None
    """Set when nothing was left to do; it may still go on."""


class FilledTime:
    """Times of all instances that were not taken yet: one open span an instance, and closed ones until `take`.

    An instance that says nothing for `silence` seconds has ended with its last word.
    """

    def __init__(self, silence: float) -> None:
        self._silence = silence
        self._open: dict[str, _OpenSpan] = {}
        self._closed: list[FilledSpan] = []

    def note(self, instance_id: str, busy: bool, now: float) -> None:
        """Record whether an instance pre-generates from now on."""
        span = self._open.get(instance_id)
        if span is not None and span.end is not None and now - span.end > _PAUSE:
            self._close(instance_id, span.end)
            span = None
        if span is None:
            if busy:
                self._open[instance_id] = _OpenSpan(now, now)
            return
        span.heard = now
        if busy:
            span.end = None
        elif span.end is None:
            span.end = now

    def take(self, now: float) -> list[FilledSpan]:
        """Return the spans that are over, and the begins of very long ones."""
        for instance_id, span in list(self._open.items()):
            if span.end is not None and now - span.end > _PAUSE:
                self._close(instance_id, span.end)
            elif now - span.heard > self._silence:
                self._close(instance_id, span.heard)
            elif now - span.begin > _LONGEST:
                self._closed.append(FilledSpan(instance_id, span.begin, span.heard))
                span.begin = span.heard
        taken, self._closed = self._closed, []
        return taken

    def _close(self, instance_id: str, end: float) -> None:
        span = self._open.pop(instance_id)
        self._closed.append(FilledSpan(instance_id, span.begin, end))


def filled_records(spans: Sequence[FilledSpan]) -> list[DecisionRecord]:
    """Return the decision-log entries of these spans, each of at most `MOST`."""
    return [_record(spans[first : first + MOST]) for first in range(0, len(spans), MOST)]


def _record(spans: Sequence[FilledSpan]) -> DecisionRecord:
    seconds = sum(span.end - span.begin for span in spans)
    instances = len({span.instance_id for span in spans})
    words = f"{instances} instances pre-generated for {seconds:.1f} s in all"
    told = [[span.instance_id, round(span.begin, 3), round(span.end, 3)] for span in spans]
    return DecisionRecord(KIND, words, 0.0, {"filled": told}, max(span.end for span in spans))
