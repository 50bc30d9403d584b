"""Traces: which sample was where, from the trainer's call through gateway, instances and migrations.

Off until `start_tracing` is given a configured endpoint: before, no tracer is imported and every span is
`NO_SPAN`. Context goes from process to process as a W3C traceparent: in the metadata of calls, and in the items of
work streams, whose streams outlive any trace.

A span is begun where there is one to belong to, or as the root of a trace where a trainer calls; what services do
by themselves, such as polling, makes no traces.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

import structlog

from services.platform.config import ConfigError, ServiceConfig

if TYPE_CHECKING:
    from services.platform.otlp import OtlpTracer

TRACE_PARENT = "traceparent"
"""Metadata key of the caller's span."""
_PUBLIC = "/paceline.v1."
"""Methods that trainers call."""

Attribute = str | int | float | bool


class Span:
    """A span that is under way. This one is nothing: it takes notes and forgets them."""

    __slots__ = ()

    traceparent = ""
    """What those who go on with it are told; empty when nothing is traced."""

    def event(self, name: str, **attributes: Attribute) -> None:
        """Note that something has happened."""

    def end(self, error: str = "", **attributes: Attribute) -> None:
        """The end, with what is known by now; `error` when it failed. Only the first end counts."""


NO_SPAN = Span()

_current: ContextVar[Span] = ContextVar("span", default=NO_SPAN)
_tracer: OtlpTracer | None = None


def start_tracing(service: str, config: ServiceConfig) -> None:
    """Begins to export spans to `config.tracing_endpoint`, if there is one.

    ConfigError when what that takes is not installed.
    """
    global _tracer
    if config.tracing_endpoint is None:
        return
    try:
        from services.platform.otlp import OtlpTracer
    except ImportError as error:
        problem = f"tracing_endpoint needs the extra `tracing`: pip install paceline[tracing] ({error})"
        raise ConfigError([problem]) from error
    _tracer = OtlpTracer(service, config)


def stop_tracing() -> None:
    """Exports what is left, for a short time, and ends."""
    global _tracer
    tracer, _tracer = _tracer, None
    if tracer is not None:
        tracer.stop()


def active() -> bool:
    """Whether spans are exported."""
    return _tracer is not None


def begin(name: str, parent: str | None = None, *, root: bool = False, **attributes: Attribute) -> Span:
    """A new span, to be ended by the caller, from any thread.

    Args:
        name: what is being done, in few words.
        parent: traceparent that it belongs to; None: that of the call being served.
        root: begin a trace where there is no parent; else the span is then `NO_SPAN`.
        attributes: what is known at the beginning.
    """
    if _tracer is None:
        return NO_SPAN
    belongs = _current.get().traceparent if parent is None else parent
    if not belongs and not root:
        return NO_SPAN
    return _tracer.begin(name, belongs, attributes)


def serve(method: str, parent: str) -> Span:
    """The span of an RPC that is served, `method` being "/package.Service/Method" and `parent` the caller's
    traceparent. What is begun from here on in the same task belongs to it."""
    if _tracer is None:
        return NO_SPAN
    if not parent and not method.startswith(_PUBLIC):
        return NO_SPAN
    service, _, name = method.removeprefix("/").rpartition("/")
    attributes: dict[str, Attribute] = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
    span = _tracer.begin(method.removeprefix("/"), parent, attributes, server=True)
    enter(span)
    return span


def enter(span: Span) -> None:
    """What is begun from here on in the same task belongs to this span, and so do the calls made."""
    _current.set(span)
    if span.traceparent:
        structlog.contextvars.bind_contextvars(trace_id=span.traceparent.split("-")[1])


def current() -> Span:
    """The span of the call that is being served."""
    return _current.get()
