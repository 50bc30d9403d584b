"""What happens around every RPC of a server, whatever its shape.

Identifies the request, checks token and deadline, counts, and turns exceptions into statuses. An exception
that nobody expected becomes INTERNAL with nothing but the request id: the text stays in the log.
"""

from __future__ import annotations

import inspect
import math
import re
import time
import uuid
from asyncio import CancelledError, Task, current_task
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from google.rpc import error_details_pb2

from services.platform import tracing
from services.platform.errors import InvalidArgument, ServiceError, Unavailable, to_status
from services.platform.guard import Guard
from services.platform.metrics import RpcMetrics
from services.platform.store import OUTAGES
from services.platform.violations import Violation

log = structlog.get_logger(__name__)

REQUEST_ID = "x-request-id"
"""Metadata key of the request id, from the client and back in the trailer."""
STATUS_DETAILS = "grpc-status-details-bin"
"""Trailing metadata key of the serialized google.rpc.Status."""
HEALTH = "/grpc.health.v1.Health/"
"""Methods that probes call, without token or deadline."""
WATCH = f"{HEALTH}Watch"
"""The method whose calls never end by themselves."""

_FAULTS = {"DATA_LOSS", "DEADLINE_EXCEEDED", "INTERNAL", "UNAVAILABLE", "UNIMPLEMENTED", "UNKNOWN"}
"""Statuses that are an error of the server, as OpenTelemetry's conventions have it."""
_SAFE_ID = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every RPC; `service` is the label of the metrics. Without a guard everybody may call everything."""

    def __init__(self, service: str, guard: Guard | None, metrics: RpcMetrics) -> None:
        self._service = service
        self._guard = guard
        self._metrics = metrics
        self._watchers: set[Task[Any]] = set()
        self._stopping = False

    def end_watchers(self) -> None:
        """Ends the streams that watch health."""
        self._stopping = True
        for watcher in self._watchers:
            watcher.cancel()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler of the method with all that this module does around it."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        return self._wrap(handler, handler_call_details.method)

    def _wrap(self, handler: Handler, method: str) -> Handler:
        shape = f"{_arity(handler.request_streaming)}_{_arity(handler.response_streaming)}"
        behaviour = getattr(handler, shape)
        unary = shape == "unary_unary"

        async def call(request: Any, context: Context) -> Any:
            async with self._around(method, unary, context):
                return await behaviour(request, context)

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            async with self._around(method, unary, context), aclosing(behaviour(request, context)) as replies:
                async for response in replies:
                    yield response

        make = getattr(grpc, f"{shape}_rpc_method_handler")
        wrapped = stream if inspect.isasyncgenfunction(behaviour) else call
        return make(wrapped, handler.request_deserializer, handler.response_serializer)  # type: ignore[no-any-return]

    @asynccontextmanager
    async def _around(self, method: str, unary: bool, context: Context) -> AsyncIterator[None]:
        request_id = _request_id(context)
        # Every RPC runs in a task of its own, so the binding ends with it.
        structlog.contextvars.bind_contextvars(request_id=request_id, rpc=method)
        trailer = ((REQUEST_ID, request_id),)
        context.set_trailing_metadata(trailer)
        labels = (self._service, method.removeprefix("/"))
        span = tracing.serve(method, _metadata(context, tracing.TRACE_PARENT)) if tracing.active() else None
        self._metrics.in_flight.labels(*labels).inc()
        began = time.perf_counter()
        code = grpc.StatusCode.UNKNOWN.name
        error: ServiceError | None = None
        try:
            self._admit(method, unary, context)
            if method == WATCH:
                self._track(current_task())
            yield
            code = _code(context)
            _keep(context, trailer)
        except grpc.aio.AbortError:
            code = _code(context)
            raise
        except Exception as raised:
            error = _service_error(raised, request_id)
            code = error.code.name
        except (CancelledError, GeneratorExit):
            code = _cancelled_code(context)
            if not (self._stopping and method == WATCH):
                raise
            error = Unavailable("the server is stopping")
        finally:
            self._metrics.in_flight.labels(*labels).dec()
            self._metrics.requests.labels(*labels, code).inc()
            self._metrics.seconds.labels(*labels).observe(time.perf_counter() - began)
            if span is not None:
                span.end(code if code in _FAULTS else "", **{"rpc.grpc.status_code": code})
        # Only now, so that whoever has the answer also finds the call counted.
        if error is not None:
            status = to_status(error)
            details = (STATUS_DETAILS, status.SerializeToString())
            await context.abort(error.code, status.message, (*trailer, details))

    def _track(self, watcher: Task[Any] | None) -> None:
        if watcher is not None:
            self._watchers.add(watcher)
            watcher.add_done_callback(self._watchers.discard)

    def _admit(self, method: str, unary: bool, context: Context) -> None:
        if method.startswith(HEALTH):
            return
        if self._guard is not None:
            self._guard.admit(method, _metadata(context, "authorization"))
        if unary and not _has_deadline(context):
            raise InvalidArgument([Violation("deadline", "is missing; every call must set a timeout")])


def _service_error(error: Exception, request_id: str) -> ServiceError:
    """`error` as the caller may see it; anything unexpected is logged here."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, OUTAGES):
        log.warning("store_unreachable", error=str(error))
        return Unavailable("the store cannot be reached")
    log.error("rpc_failed", exc_info=error)
    detail = error_details_pb2.RequestInfo(request_id=request_id)
    return ServiceError(f"internal error, request id {request_id}", detail, code=grpc.StatusCode.INTERNAL)


def _request_id(context: Context) -> str:
    given = _metadata(context, REQUEST_ID)
    return given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex


def _metadata(context: Context, wanted: str) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == wanted:
            return value if isinstance(value, str) else ""
    return ""


def _has_deadline(context: Context) -> bool:
    remaining = context.time_remaining()
    return remaining is not None and math.isfinite(remaining)


def _keep(context: Context, trailer: tuple[tuple[str, str], ...]) -> None:
    """Puts the trailer back when the servicer has set another."""
    present = tuple(context.trailing_metadata() or ())
    if not any(key == REQUEST_ID for key, _ in present):
        context.set_trailing_metadata((*present, *trailer))


def _code(context: Context) -> str:
    code: Any = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return _CODES.get(code or 0, grpc.StatusCode.UNKNOWN.name)


def _cancelled_code(context: Context) -> str:
    late = _has_deadline(context) and context.time_remaining() <= 0
    return (grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED).name


def _arity(streaming: bool) -> str:
    return "stream" if streaming else "unary"
