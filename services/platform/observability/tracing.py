"""Trace samples across processes: from the trainer's call through gateway, instances and migrations.

Until `start` gets a tracer, every span is `NO_SPAN`. Context travels between processes as a W3C traceparent: in the
metadata of calls, and in the messages of work streams, which outlive any trace.

A span is the child of another one, or the root of a trace where a trainer calls. Background work of the services,
such as polling, is not traced.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Protocol

import structlog

TRACE_PARENT = "traceparent"
"""Metadata key of the caller's span, as W3C Trace Context defines it."""
_PUBLIC = "/paceline.v1."
"""Methods that trainers call."""

Attribute = str | int | float | bool


class TraceSpan:
    """A span under way. This base class records nothing; `otlp.OtlpSpan` exports."""

    __slots__ = ()

    traceparent = ""
    """Context for children of the span in other processes; empty when nothing is traced."""

    def event(self, name: str, **attributes: Attribute) -> None:
        """Record that something has happened."""

    def end(self, error: str = "", **attributes: Attribute) -> None:
        """End the span with more attributes; `error` if it failed. Later calls have no effect."""


NO_SPAN = TraceSpan()


class Tracer(Protocol):
    """Exporter of spans, such as `otlp.OtlpTracer`."""

    def begin(
        self, name: str, parent: str, attributes: Mapping[str, Attribute], *, server: bool = False
    ) -> TraceSpan:
        """Return a span under `parent`, a traceparent."""
        ...

    def stop(self) -> None:
        """Export the remaining spans."""
        ...


_current: ContextVar[TraceSpan] = ContextVar("span", default=NO_SPAN)
_tracer: Tracer | None = None


def start(tracer: Tracer) -> None:
    """Begin spans with `tracer` from now on."""
    global _tracer
    _tracer = tracer


def stop() -> None:
    """Export the remaining spans, for a short time, and stop tracing."""
    global _tracer
    tracer, _tracer = _tracer, None
    if tracer is not None:
        tracer.stop()


def active() -> bool:
    """Return True while spans are exported."""
    return _tracer is not None


def begin(name: str, parent: str | None = None, *, root: bool = False, **attributes: Attribute) -> TraceSpan:
    """Return a new span, to be ended by the caller, from any thread.

    Args:
        name: short name of the operation.
        parent: traceparent of the parent span; None: the span of the call being served.
        root: begin a trace if there is no parent, instead of returning `NO_SPAN`.
        attributes: attributes known at the beginning.
    """
    if _tracer is None:
        return NO_SPAN
    above = _current.get().traceparent if parent is None else parent
    if not above and not root:
        return NO_SPAN
    return _tracer.begin(name, above, attributes)


def serve(method: str, parent: str) -> TraceSpan:
    """Return the span of an RPC that is served; spans begun later in the same task are its children.

    `method` is "/package.Service/Method", `parent` the caller's traceparent.
    """
    if _tracer is None or not (parent or method.startswith(_PUBLIC)):
        return NO_SPAN
    service, _, name = method.removeprefix("/").rpartition("/")
    attributes: dict[str, Attribute] = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
    span = _tracer.begin(method.removeprefix("/"), parent, attributes, server=True)
    enter(span)
    return span


def enter(span: TraceSpan) -> None:
    """Make a span the parent of spans begun, and calls made, from now on in the same task."""
    _current.set(span)
    if span.traceparent:
        structlog.contextvars.bind_contextvars(trace_id=span.traceparent.split("-")[1])


def current() -> TraceSpan:
    """Return the span of the call that is being served."""
    return _current.get()
