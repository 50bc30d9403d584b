"""Spans of traces, and the span that stands for none while nothing is traced."""

from __future__ import annotations

TRACE_PARENT = "traceparent"
"""Metadata key of the caller's span, as W3C Trace Context defines it."""

Attribute = str | int | float | bool


class TraceSpan:
    """A span under way. This base class records nothing; `otlp.OtlpSpan` exports."""

    __slots__ = ()

    traceparent = ""
    """Context for those who continue the trace; empty when nothing is traced."""

    def event(self, name: str, **attributes: Attribute) -> None:
        """Record that something has happened."""

    def end(self, error: str = "", **attributes: Attribute) -> None:
        """End the span with more attributes; `error` when it failed. Later calls have no effect."""


NO_SPAN = TraceSpan()
