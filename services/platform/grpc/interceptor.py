"""Intercept all RPCs of a server: identify, authorize, count, and turn exceptions into statuses.

An unexpected exception becomes INTERNAL with only the request id; its text stays in the log. A call without a valid
token is refused before its message is received, and bytes that are no message are an InvalidArgument.
"""

from __future__ import annotations

import inspect
import math
import re
import time
import uuid
from asyncio import CancelledError, Task, current_task, get_running_loop, timeout
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Self, cast

import grpc
import structlog
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2

from paceline.transport.channel import CALLER
from services.contracts.errors import (
    InvalidArgument,
    ResourceExhausted,
    ServiceError,
    Unavailable,
    Unimplemented,
    to_status,
)
from services.platform.grpc.parse_budget import NO_MESSAGE, ParseBudget, Shape, shape_of
from services.platform.observability import tracing
from services.platform.observability.metrics import RpcMetrics
from services.platform.observability.tracing import TRACE_PARENT
from services.platform.redis.connection import OUTAGES, reason_of
from services.platform.security.caller import TokenHolder, act_for, check_runs, current_caller, read_caller
from services.platform.security.guard import Guard
from services.platform.tasks import is_cancelled

log = structlog.get_logger(__name__)

REQUEST_ID = "x-request-id"
"""Metadata key of the request id, from the client and back in the trailer."""
STATUS_DETAILS = "grpc-status-details-bin"
"""Trailing metadata key of the serialized google.rpc.Status."""
HEALTH = "/grpc.health.v1.Health/"
"""Prefix of the methods that probes call, without token or deadline."""
WATCH = f"{HEALTH}Watch"
"""Method whose calls never end by themselves."""

_FAULTS = {"DATA_LOSS", "DEADLINE_EXCEEDED", "INTERNAL", "UNAVAILABLE", "UNIMPLEMENTED", "UNKNOWN"}
"""Statuses that count as errors of the server, by OpenTelemetry's conventions."""
_UNARY_SECONDS = 600.0
"""Longest time of a unary call without a deadline, the default in stubs of other languages."""
_SAFE_ID = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor with a guard; without one every caller may call every method.

    `service` labels the metrics. More than `max_calls` at once, health not counted, are refused, and messages are
    parsed once `budget` has room for them.
    """

    def __init__(
        self, service: str, guard: Guard | None, metrics: RpcMetrics, max_calls: int, budget: ParseBudget
    ) -> None:
        self._service = service
        self._guard = guard
        self._metrics = metrics
        self._max_calls = max_calls
        self._budget = budget
        self._calls: set[Task[Any]] = set()
        self._watchers: set[Task[Any]] = set()
        self._stopping = False

    def end_watchers(self) -> None:
        """End the streams of callers that watch health."""
        self._stopping = True
        for watcher in self._watchers:
            watcher.cancel()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the wrapped handler of the method, or one that refuses the call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        try:
            self._admit(method, handler_call_details.invocation_metadata)
        except Exception as refusal:
            return self._refuse(method, refusal, streams=handler.response_streaming)
        return self._wrap(handler, method)

    def _admit(self, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Check the caller and count the call until it is handled or its task ends; raise to refuse it."""
        if method.startswith(HEALTH):
            return
        on_behalf = _value(metadata, CALLER)
        if self._guard is not None:
            self._guard.admit(method, _value(metadata, "authorization"), on_behalf)
        elif on_behalf:
            # Without required tokens this can only restrict the call.
            act_for(read_caller(on_behalf))
        if len(self._calls) >= self._max_calls:
            raise ResourceExhausted(
                "concurrent_calls",
                f"{len(self._calls)} calls are being served, which is the most; come again",
                retry_after=1.0,
            )
        task = cast(Task[Any], current_task())
        self._calls.add(task)
        # The handler is never entered if the caller leaves early.
        task.add_done_callback(self._calls.discard)

    def _refuse(self, method: str, refusal: Exception, *, streams: bool) -> Handler:
        async def call(requests: AsyncIterator[bytes], context: Context) -> None:
            async with self._around(method, context):
                raise refusal

        async def stream(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
            await call(requests, context)
            answers: tuple[bytes, ...] = ()
            for answer in answers:
                yield answer

        # Handled as a stream of requests, since gRPC would otherwise receive the message first. For unary answers
        # gRPC sends an empty message with the status, which a reader of a stream would take for an answer.
        if streams:
            return grpc.stream_stream_rpc_method_handler(stream)  # type: ignore[arg-type, return-value]
        return grpc.stream_unary_rpc_method_handler(call)  # type: ignore[arg-type, return-value]

    def _wrap(self, handler: Handler, method: str) -> Handler:
        shape = f"{_arity(handler.request_streaming)}_{_arity(handler.response_streaming)}"
        behaviour = getattr(handler, shape)
        unary = shape == "unary_unary" and not method.startswith(HEALTH)
        parser = _Parser(handler.request_deserializer, self._budget, method, current_caller())

        def messages(request: Any, context: Context) -> AbstractAsyncContextManager[Any]:
            if handler.request_streaming:
                return aclosing(_Parsed(request, parser, context))
            return parser.parsed(request, context, handled=not handler.response_streaming)

        async def call(request: Any, context: Context) -> Any:
            async with (
                self._around(method, context),
                self._in_time(context, unary=unary),
                messages(request, context) as message,
            ):
                return await behaviour(message, context)

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            async with (
                self._around(method, context),
                messages(request, context) as message,
                aclosing(behaviour(message, context)) as replies,
            ):
                async for response in replies:
                    yield response

        make = getattr(grpc, f"{shape}_rpc_method_handler")
        wrapped = stream if inspect.isasyncgenfunction(behaviour) else call
        # No deserializer, since gRPC would answer its errors as UNKNOWN.
        return make(wrapped, None, handler.response_serializer)  # type: ignore[no-any-return]

    @asynccontextmanager
    async def _in_time(self, context: Context, *, unary: bool) -> AsyncIterator[None]:
        """Bound a unary call without a deadline; streams are not bounded, since keepalive watches their peers."""
        seconds = _UNARY_SECONDS if unary and time_left(context) is None else None
        try:
            async with timeout(seconds) as limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            text = f"it took {seconds:g} s, the most without a deadline; set one if it may take longer"
            raise ServiceError(text, code=grpc.StatusCode.DEADLINE_EXCEEDED) from error

    @asynccontextmanager
    async def _around(self, method: str, context: Context) -> AsyncIterator[None]:
        request_id = _request_id(context)
        # Every RPC runs in a separate task, so the binding ends with it.
        structlog.contextvars.bind_contextvars(request_id=request_id, rpc=method)
        trailer = ((REQUEST_ID, request_id),)
        context.set_trailing_metadata(trailer)
        labels = (self._service, method.removeprefix("/"))
        span = tracing.serve(method, _metadata(context, TRACE_PARENT)) if tracing.active() else None
        self._metrics.in_flight.labels(*labels).inc()
        began = time.perf_counter()
        code = grpc.StatusCode.UNKNOWN.name
        error: ServiceError | None = None
        try:
            if method == WATCH:
                watcher = cast(Task[Any], current_task())
                self._watchers.add(watcher)
                watcher.add_done_callback(self._watchers.discard)
            yield
            code = _code(context)
            _keep(context, trailer)
        except grpc.aio.AbortError:
            code = _code(context)
            raise
        except Exception as raised:
            error = _without_frames(_service_error(raised, request_id))
            code = error.code.name
        except (CancelledError, GeneratorExit) as ended:
            code = _cancelled_code(context)
            if self._stopping and method == WATCH:
                error = Unavailable("the server is stopping")
            elif isinstance(ended, CancelledError) and not is_cancelled():
                # An awaited task was cancelled, not this RPC; without a status gRPC would never answer.
                error = Unavailable("the work that the call waits for was ended")
                log.warning("awaited_work_ended", exc_info=ended)
                code = error.code.name
            else:
                raise
        finally:
            self._calls.discard(cast(Task[Any], current_task()))
            self._metrics.in_flight.labels(*labels).dec()
            self._metrics.requests.labels(*labels, code).inc()
            if error is not None:
                self._metrics.count_refusal(self._service, error)
            self._metrics.seconds.labels(*labels).observe(time.perf_counter() - began)
            if span is not None:
                span.end(code if code in _FAULTS else "", **{"rpc.grpc.status_code": code})
        # Last, so that a caller that has the answer finds the call counted, and room for the next one.
        if error is not None:
            status = to_status(error)
            # Not `abort`: its exception and the call, with its request, refer to each other, so that megabytes
            # would stay until the next garbage collection.
            context.set_code(error.code)
            context.set_details(status.message)
            context.set_trailing_metadata((*trailer, (STATUS_DETAILS, status.SerializeToString())))


class _Parser:
    """Parser of a caller's requests to one method, within the budget of the server."""

    def __init__(
        self,
        deserialize: Callable[[bytes], Any] | None,
        budget: ParseBudget,
        method: str,
        caller: TokenHolder | None,
    ) -> None:
        self._deserialize = deserialize
        self._budget = budget
        self._method = method
        self._caller = caller
        kind = getattr(deserialize, "__self__", None)
        self._shape = Shape() if kind is None else shape_of(kind.DESCRIPTOR)

    async def take(self, request: bytes, context: Context) -> int:
        """Wait for room for a message; return the bytes to give back."""
        return await self._budget.take(request, self._shape, lambda: self._place(context))

    def _place(self, context: Context) -> str:
        """Return the key of a queue for room: the name of the caller, or the address of one without a name."""
        return context.peer().rpartition(":")[0] if self._caller is None else f"caller {self._caller.name}"

    def give_back(self, counted: int) -> None:
        """Give back the room of a message."""
        self._budget.give_back(counted)

    def parse(self, request: bytes) -> Any:
        """Return the message.

        InvalidArgument: the bytes are no message. PermissionDenied: it names a run that is not the caller's.
        """
        try:
            parsed = request if self._deserialize is None else self._deserialize(request)
        except DecodeError as error:
            raise InvalidArgument([NO_MESSAGE]) from error
        if self._caller is not None:
            check_runs(self._caller, self._method, parsed)
        return parsed

    @asynccontextmanager
    async def parsed(self, request: bytes, context: Context, *, handled: bool) -> AsyncIterator[Any]:
        """Yield the message, and give back its room.

        With `handled`, at the end of the block. Otherwise, for calls answered by a stream, once the handler waits
        for the first time: it has then read the message, and may run for hours.
        """
        counted = await self.take(request, context)
        if not handled:
            get_running_loop().call_soon(self.give_back, counted)
        try:
            yield self.parse(request)
        finally:
            if handled:
                self.give_back(counted)


class _Parsed:
    """Messages of a caller's stream, parsed one by one.

    The room of a message is given back when the next one is requested.
    """

    def __init__(self, requests: AsyncIterator[bytes], parser: _Parser, context: Context) -> None:
        # Not aiter, which starts gRPC's generator: if the call ends before it reads, Python would warn of a
        # coroutine that was never awaited.
        self._requests = requests
        self._parser = parser
        self._context = context
        self._held = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        await self.aclose()
        request = await anext(self._requests)
        self._held = await self._parser.take(request, self._context)
        return self._parser.parse(request)

    async def aclose(self) -> None:
        """Give back the room of the last message."""
        held, self._held = self._held, 0
        self._parser.give_back(held)


def _service_error(error: Exception, request_id: str) -> ServiceError:
    """Return the error that the caller may see; an unexpected one is logged."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, OUTAGES):
        log.warning("store_unusable", error=str(error))
        return Unavailable(f"the store cannot be used now: {reason_of(error)}")
    if isinstance(error, NotImplementedError):
        return Unimplemented("method", "this method is not served here")
    log.error("rpc_failed", exc_info=error)
    detail = error_details_pb2.RequestInfo(request_id=request_id)
    return ServiceError(f"internal error, request id {request_id}", detail, code=grpc.StatusCode.INTERNAL)


def _without_frames(error: ServiceError) -> ServiceError:
    """Remove the traceback of an error, whose frames refer to the request and it to them.

    A request of megabytes would otherwise stay until the next full garbage collection.
    """
    held: list[BaseException] = [error]
    while held:
        each = held.pop()
        held += [other for other in (each.__cause__, each.__context__) if other is not None]
        each.__traceback__ = each.__cause__ = each.__context__ = None
    return error


def _request_id(context: Context) -> str:
    given = _metadata(context, REQUEST_ID)
    return given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex


def _metadata(context: Context, wanted: str) -> str:
    return _value(context.invocation_metadata(), wanted)


def _value(metadata: Iterable[tuple[str, str | bytes]] | None, wanted: str) -> str:
    for key, value in metadata or ():
        if key == wanted:
            return value if isinstance(value, str) else ""
    return ""


def time_left(context: Context) -> float | None:
    """Return the seconds until a call's deadline; None if it has none."""
    remaining = context.time_remaining()
    return remaining if remaining is not None and math.isfinite(remaining) else None


def _keep(context: Context, trailer: tuple[tuple[str, str], ...]) -> None:
    """Add the trailer again if the servicer has set another one."""
    present = tuple(context.trailing_metadata() or ())
    if not any(key == REQUEST_ID for key, _ in present):
        context.set_trailing_metadata((*present, *trailer))


def _code(context: Context) -> str:
    code: Any = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return _CODES.get(code or 0, grpc.StatusCode.UNKNOWN.name)


def _cancelled_code(context: Context) -> str:
    left = time_left(context)
    late = left is not None and left <= 0
    return (grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED).name


def _arity(streaming: bool) -> str:
    return "stream" if streaming else "unary"
