"""Export spans over OTLP/gRPC with OpenTelemetry's SDK, in batches and from a separate thread.

Imported only if an endpoint is configured. No global provider is set, so that libraries with their own tracing,
such as vLLM, are unaffected. Headers, certificates and limits come from OpenTelemetry's own variables
(OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_CERTIFICATE, ...).
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.platform.config import ServiceConfig
from services.platform.observability.tracing import TRACE_PARENT, Attribute, TraceSpan

QUEUE_SPANS = 1 << 16
"""Spans that may wait for the collector; beyond that, the oldest are dropped."""
BATCH_SPANS = 512
"""Spans in one message."""
EXPORT_SECONDS = 5.0
"""Deadline of a message to the collector."""
EXPORT_EVERY_SECONDS = 1.0
STOP_SECONDS = 3.0
"""Longest time that the process waits for its last spans to be exported."""

_propagator = TraceContextTextMapPropagator()


class UnseededIds(IdGenerator):
    """Random ids from the operating system; the SDK takes its ids from `random`, which all engines seed alike."""

    def generate_trace_id(self) -> int:
        return secrets.randbits(128) or 1

    def generate_span_id(self) -> int:
        return secrets.randbits(64) or 1


class OtlpSpan(TraceSpan):
    """A span of the SDK."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, trace.set_span_in_context(span, Context()))
        self.traceparent = carrier.get(TRACE_PARENT, "")

    def event(self, name: str, **attributes: Attribute) -> None:
        self._span.add_event(name, attributes)

    def end(self, error: str = "", **attributes: Attribute) -> None:
        if not self._span.is_recording():
            return
        self._span.set_attributes(attributes)
        if error:
            self._span.set_status(trace.StatusCode.ERROR, error)
        self._span.end()


class OtlpTracer:
    """Tracer whose spans are sent to `config.tracing_endpoint`."""

    def __init__(self, service: str, config: ServiceConfig) -> None:
        assert config.tracing_endpoint is not None
        instance = getattr(config, "instance_id", None) or getattr(config, "replica_id", None)
        names = {
            "service.name": f"paceline-{service}",
            "service.namespace": config.namespace,
            "service.instance.id": instance or socket.gethostname(),
        }
        # A trace is kept or dropped as a whole, as decided where it begins.
        sampler = ParentBased(TraceIdRatioBased(config.tracing_sample_ratio))
        self._provider = TracerProvider(
            sampler=sampler,
            resource=Resource.create(names),
            shutdown_on_exit=False,
            id_generator=UnseededIds(),
        )
        exporter = OTLPSpanExporter(
            endpoint=config.tracing_endpoint,
            insecure=not config.tracing_endpoint.startswith("https://"),
            timeout=EXPORT_SECONDS,
        )
        processor = BatchSpanProcessor(
            exporter,
            max_queue_size=QUEUE_SPANS,
            schedule_delay_millis=EXPORT_EVERY_SECONDS * 1e3,
            max_export_batch_size=BATCH_SPANS,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("paceline")

    def begin(
        self, name: str, parent: str, attributes: Mapping[str, Attribute], *, server: bool = False
    ) -> OtlpSpan:
        """Return a span under `parent` (a traceparent; an invalid one counts as none)."""
        context = _propagator.extract({TRACE_PARENT: parent}, Context()) if parent else Context()
        kind = trace.SpanKind.SERVER if server else trace.SpanKind.INTERNAL
        return OtlpSpan(self._tracer.start_span(name, context, kind, dict(attributes)))

    def stop(self) -> None:
        """Export the remaining spans, and wait at most STOP_SECONDS for the collector."""
        last = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(STOP_SECONDS)
