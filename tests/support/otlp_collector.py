"""A collector of traces: a gRPC server in the test's own process that keeps what it is sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Seen:
    """One span as it arrived. Ids are hexadecimal; `process` is its service.instance.id."""

    trace: str
    id: str
    parent: str
    name: str
    service: str
    process: str
    attributes: dict[str, Any]
    events: tuple[str, ...]
    begin: int
    end: int
    failed: bool


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on `address` between `with` and its end."""

    def __init__(self) -> None:
        self._spans: list[Seen] = []
        self._changed = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(0).wait()

    def Export(self, request: Any, context: Any) -> Any:
        """Keep the spans of a message."""
        seen = []
        for resource in request.resource_spans:
            names = _attributes(resource.resource.attributes)
            for scope in resource.scope_spans:
                seen += [_seen(span, names) for span in scope.spans]
        with self._changed:
            self._spans += seen
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self) -> list[Seen]:
        """All that has arrived."""
        with self._changed:
            return list(self._spans)

    def until(self, holds: Callable[[list[Seen]], bool], seconds: float = 60) -> list[Seen]:
        """Return the spans, once `holds` of them is true."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not holds(self._spans):
                assert self._changed.wait(deadline - time.monotonic()), "the spans did not come"
            return list(self._spans)


def _seen(span: Any, names: dict[str, Any]) -> Seen:
    return Seen(
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        name=span.name,
        service=names["service.name"],
        process=names["service.instance.id"],
        attributes=_attributes(span.attributes),
        events=tuple(event.name for event in span.events),
        begin=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        failed=span.status.code == 2,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in pairs}
