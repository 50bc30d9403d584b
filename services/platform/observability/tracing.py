"""Distributed tracing of samples: from the trainer's call through gateway, instances and migrations.

Off until `start_tracing` finds a configured endpoint: before, no tracer is imported and every span is `NO_SPAN`.
Context travels between processes as a W3C traceparent: in the metadata of calls, and in the messages of work
streams, which outlive any trace.

A span is begun as the child of another one, or as the root of a trace where a trainer calls. Background work of the
services, such as polling, is not traced.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

import structlog

from paceline.installation import how_to_install
from services.platform.config import ConfigError, ServiceConfig
from services.platform.observability.span import NO_SPAN, Attribute, TraceSpan

if TYPE_CHECKING:
    from services.platform.observability.otlp import OtlpTracer

_PUBLIC = "/paceline.v1."
"""Methods that trainers call."""

_current: ContextVar[TraceSpan] = ContextVar("span", default=NO_SPAN)
_tracer: OtlpTracer | None = None


def start_tracing(service: str, config: ServiceConfig) -> None:
    """Begin to export spans to `config.tracing_endpoint`, if it is set.

    ConfigError when OpenTelemetry is not installed.
    """
    global _tracer
    if config.tracing_endpoint is None:
        return
    try:
        from services.platform.observability.otlp import OtlpTracer
    except ImportError as error:
        problem = f"tracing_endpoint needs the extra `tracing`: {how_to_install('tracing')} ({error})"
        raise ConfigError([problem]) from error
    _tracer = OtlpTracer(service, config)


def stop_tracing() -> None:
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
        parent: traceparent of the parent span; None for that of the call being served.
        root: begin a trace when there is no parent; otherwise the span is `NO_SPAN` then.
        attributes: attributes known at the beginning.
    """
    if _tracer is None:
        return NO_SPAN
    belongs = _current.get().traceparent if parent is None else parent
    if not belongs and not root:
        return NO_SPAN
    return _tracer.begin(name, belongs, attributes)


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
