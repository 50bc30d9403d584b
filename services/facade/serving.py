"""Serve the requests of all dialects: read bodies, generate samples, and write answers.

Samples run until they have ended or the client leaves. An answer is whole or a stream of events. Small bodies and
answers are handled on the event loop, which takes milliseconds; `JobRunner` gives all others to the workers.
`Facade` has the collaborators of the routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, get_args

import grpc
import msgspec
import structlog
from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline import AsyncClient
from paceline import types as t
from paceline.errors import CancelledError, DeadlineExceededError, PacelineError
from services.contracts.errors import ServiceError
from services.facade.config import FacadeConfig
from services.facade.dialects.body import Body, Limits, RequestedSamples, as_it_is
from services.facade.dialects.forms import ERRORS
from services.facade.gateway import Forecasts, ServedFleet
from services.facade.http_errors import fault, http_error
from services.facade.metrics import FacadeMetrics
from services.facade.sample_names import GivenNames, SampleNames, given_names
from services.facade.samples import SampleGroup, SampleOutput, SamplesInWork
from services.facade.text import Tokenizer
from services.facade.work.jobs import Invalid, RefusedBody, Write, encoded, packed, prepared, size_of, written
from services.facade.work.pool import FairSemaphore, WorkerPool
from services.platform.security.caller import current_caller
from services.platform.tasks import end

log = structlog.get_logger(__name__)

T = TypeVar("T")
Json = dict[str, Any]

BODY_AT_ONCE = 4 * 1024
"""Most bytes of a body that is read on the event loop. It takes a millisecond or two; a thousand texts, 40."""
_NUMBERS_AT_ONCE = 8192
"""Most numbers of an answer that is written on the event loop; each takes about a microsecond."""
_BYTES_A_NUMBER = 16
_LARGE = 1024 * 1024
_SMALL = 64 * 1024
_BUDGET, _LARGE_BUDGET = 256 * 1024 * 1024, 64 * 1024 * 1024
"""Most bytes of bodies that wait for their preparation: bodies up to a MiB, and larger ones. A caller gets half."""
_LEAST_SECONDS, _LEAST_RATE = 10.0, 256 * 1024
"""Deadline for a body to arrive: this many seconds, and one more for this many of its bytes."""
_WITHOUT_ROOM = 32 * 1024
"""Bytes of a body that arrive before room is made for all of it, so that a silent client takes no room."""
_EVENT_NUMBERS_AT_ONCE = 8192
"""Numbers of the events that are written before other tasks get their turn on the event loop."""
_NUMBERS_AN_EVENT = 128
"""Numbers that take as long as an event without any."""


class JobRunner:
    """Prepares bodies and writes answers for the routes, on the event loop if small, and else in the workers."""

    def __init__(self, tokenizer: Tokenizer | None = None, pool: WorkerPool | None = None) -> None:
        self._tokenizer = tokenizer
        self.pool = pool or WorkerPool()
        self._at_once = BODY_AT_ONCE if getattr(tokenizer, "fast", True) else 0
        self._room = FairSemaphore(_BUDGET, _BUDGET // 2)
        self._large_room = FairSemaphore(_LARGE_BUDGET, _LARGE_BUDGET // 2)

    @asynccontextmanager
    async def room(self, request: Request, length: int) -> AsyncIterator[None]:
        """Wait for room for a body of this length, and hold it within the context; a small body needs none."""
        if length <= _SMALL:
            yield
            return
        room = self._large_room if length > _LARGE else self._room
        async with room.hold(caller_of(request), length):
            yield

    async def body(self, request: Request, raw: bytes, kind: type[Body], limits: Limits | None) -> Body:
        """Return the prepared body of a request. InvalidArgument or RequestValidationError names what is wrong."""
        trusts = limits is not None and limits.trust_request_chat_template
        # A template may run for long, so it never gets the place that is kept for small bodies. Neither do
        # variables for the model's own template.
        template = trusts and _may_name(raw, b"chat_template")
        if len(raw) <= self._at_once and not template and not _may_name(raw, b"chat_template_kwargs"):
            found = prepared(self._tokenizer, raw, kind, limits)
        else:
            size = max(len(raw), _LARGE + 1) if template else len(raw)
            job = self.pool.run(prepared, raw, kind, limits, size=size, caller=caller_of(request))
            found = await while_connected(request, job)
        if isinstance(found, RefusedBody):
            request.state.names = found.names
            raise found.kind(found.violations)
        if isinstance(found, Invalid):
            raise RequestValidationError(found.problems)
        body: Body = found
        request.state.names = body.names_in_body()
        return body

    async def answer(
        self, request: Request, outputs: Sequence[SampleOutput], write: Write
    ) -> bytes | bytearray:
        """Return an answer as JSON."""
        size = size_of(outputs)
        if size <= _NUMBERS_AT_ONCE:
            return encoded(write(self._tokenizer, outputs, as_it_is))

        async def job() -> Any:
            pieces = await packed(outputs)
            size_in_bytes, caller = size * _BYTES_A_NUMBER, caller_of(request)
            return await self.pool.run(written, pieces, write, size=size_in_bytes, caller=caller)

        return await while_connected(request, job())


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of work, which is cancelled when the client of the request leaves."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise client_left()
        return working.result()
    finally:
        for each in (working, leaving):
            each.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    """Wait until the client of a request leaves, the only message that may follow a body."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def client_left() -> CancelledError:
    """Return the error of a request whose client has left; it is not sent."""
    return CancelledError(grpc.StatusCode.CANCELLED, "the client has left")


def _may_name(raw: bytes, name: bytes) -> bool:
    """Return False if a body certainly lacks a name; a name may also be written with escapes."""
    return b'"%b"' % name in raw or b"\\u" in raw


def caller_of(request: Request) -> str:
    """Return the sender of a request: the name of its token, or else its address."""
    if (caller := current_caller()) is not None:
        return caller.name
    return request.client.host if request.client is not None else ""


@dataclass(frozen=True, slots=True)
class Facade:
    """Collaborators of the routes."""

    config: FacadeConfig
    client: Callable[[], AsyncClient]
    fleet: ServedFleet
    samples: SamplesInWork
    tokenizer: Tokenizer | None
    metrics: FacadeMetrics
    names: SampleNames
    forecasts: Forecasts
    jobs: JobRunner = field(default_factory=JobRunner)
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters of vLLM's dialect for requests that leave them out."""

    def run_id(self, request: Request) -> str:
        """Return the run of a request. PermissionDenied: it is not a run of the caller."""
        return self._given(request).run_id

    def _given(self, request: Request) -> GivenNames:
        """Return the names in the headers of a request. Only this method reads the run.

        A request that names no run has the facade's, unless the caller's token is for other runs: then the first
        run that it names in full. The gateway checks again, since it receives the name of the caller.
        """
        caller = current_caller()
        default = self.config.run_id if caller is None else caller.run_or(self.config.run_id)
        given = given_names(request.headers, default)
        if caller is not None:
            caller.check_run(given.run_id)
        return given

    async def limits(self, request: Request) -> Limits:
        """Return the limits for the body of a request. UnavailableError: no instance is known."""
        model, config = await self.fleet.model(), self.config
        return Limits(
            model.names,
            model.vocab_size,
            model.max_model_len,
            config.logprobs_mode,
            config.max_samples_per_request,
            config.max_hinted_samples,
            config.trust_request_chat_template,
            self._given(request).prefix or 0,
            self.defaults,
        )

    async def requests(self, request: Request, requested: RequestedSamples) -> list[t.SampleRequest]:
        """Return the SDK's requests for the samples, prompt by prompt.

        InvalidArgument: headers do not fit. PermissionDenied: the run is not a run of the caller.
        """
        given = self._given(request)
        step = await self.fleet.recent_version() if given.step is None else given.step
        found = self.names.requests(requested, given, step)
        self.forecasts.observe(found)
        return found

    @asynccontextmanager
    async def generating(
        self, request: Request, requests: Sequence[t.SampleRequest], request_id: str = ""
    ) -> AsyncIterator[SampleGroup]:
        """Generate samples within the context; they end with it, or when the client leaves."""
        async with self.samples.generate(requests, request_id) as group:
            leaving = asyncio.create_task(self._end_with_client(request, group))
            try:
                yield group
            finally:
                await end([leaving])
                self.names.settle(group.outputs)

    async def outputs(
        self, request: Request, requests: Sequence[t.SampleRequest], dialect: str, request_id: str = ""
    ) -> list[SampleOutput]:
        """Generate samples, and return them once all have ended."""
        async with self.generating(request, requests, request_id) as group:
            found = await group.wait()
        self.count(found, dialect)
        return found

    async def answer(self, request: Request, outputs: Sequence[SampleOutput], write: Write) -> Response:
        """Return the answer that `write` makes of the samples."""
        body = await self.jobs.answer(request, outputs, write)
        return Response(
            memoryview(body) if isinstance(body, bytearray) else body, media_type="application/json"
        )

    async def _end_with_client(self, request: Request, group: SampleGroup) -> None:
        await _disconnected(request)
        self.metrics.disconnects.inc()
        await group.fail(client_left())

    def count(self, outputs: Sequence[SampleOutput], dialect: str) -> None:
        """Count the tokens of an answer."""
        self.metrics.tokens.labels(dialect).inc(sum(len(output.token_ids) for output in outputs))


def body_router(facade: Facade, tag: str, prefix: str = "") -> APIRouter:
    """Return a router whose handlers get prepared bodies; `tag` is their heading in the page of the API."""

    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle, kind = super().get_route_handler(), _kind_of(self)
            if kind is None:
                return handle

            async def with_body(request: Request) -> Response:
                prepared = _PreparedRequest(request.scope, request.receive)
                async with AsyncExitStack() as room:
                    prepared.raw = await _body_of(request, facade.jobs, room)

                    async def prepare() -> Body:
                        raw, prepared.raw = prepared.raw, b""
                        limits = await facade.limits(request) if kind.of_model else None
                        body = await facade.jobs.body(request, raw, kind, limits)
                        await room.aclose()
                        return body

                    prepared.prepare = prepare
                    try:
                        return await handle(prepared)
                    except _WrappedError as wrapped:
                        raise wrapped.error from None

            return with_body

    return APIRouter(tags=[tag], prefix=prefix, route_class=BodyRoute, responses=ERRORS)


class _PreparedRequest(Request):
    """Request whose JSON is the prepared body: FastAPI asks for it, and finds that it needs no more checks."""

    raw: bytes
    prepare: Callable[[], Awaitable[Body]]

    async def body(self) -> bytes:
        """Return the first byte of the body, if any: FastAPI would keep all of it until the request ends."""
        return self.raw[:1]

    async def json(self) -> Body:
        """Return the prepared body."""
        try:
            return await self.prepare()
        except Exception as error:
            # FastAPI would take any other error for a mistake in the JSON.
            raise _WrappedError(error) from error


class _WrappedError(HTTPException):
    def __init__(self, error: Exception) -> None:
        super().__init__(500)
        self.error = error


async def _body_of(request: Request, jobs: JobRunner, room: AsyncExitStack) -> bytes:
    """Return the body. Its room, which is requested once the body begins to arrive, is put into `room`."""
    stated = request.headers.get("content-length", "")
    length = int(stated) if stated.isdigit() else 0
    pieces: list[bytes] = []
    received, has_room = 0, False
    try:
        async with asyncio.timeout(_LEAST_SECONDS + length / _LEAST_RATE) as deadline:
            async for piece in request.stream():
                pieces.append(piece)
                received += len(piece)
                if not has_room and received >= min(length, _WITHOUT_ROOM):
                    has_room = True
                    left = (deadline.when() or 0.0) - asyncio.get_running_loop().time()
                    deadline.reschedule(None)
                    await room.enter_async_context(jobs.room(request, length))
                    deadline.reschedule(asyncio.get_running_loop().time() + left)
    except ClientDisconnect:
        raise client_left() from None
    except TimeoutError:
        found = f"{received} of {length} bytes of the body have come; the least is {_LEAST_RATE} a second"
        raise DeadlineExceededError(grpc.StatusCode.DEADLINE_EXCEEDED, found) from None
    return b"".join(pieces)


def _kind_of(route: APIRoute) -> type[Body] | None:
    if route.body_field is None:
        return None
    annotation = route.body_field.field_info.annotation
    kinds = [each for each in (annotation, *get_args(annotation)) if isinstance(each, type)]
    return next(each for each in kinds if issubclass(each, Body))


class EventWriter(Protocol):
    """Writer of the events of an answer in a dialect."""

    def events(self, changed: Sequence[tuple[int, SampleOutput]]) -> list[Json]:
        """Return the events of the samples that have changed, which come with their places."""

    def last_events(self, outputs: Sequence[SampleOutput]) -> list[Json]:
        """Return the events that follow the samples."""


class EventResponse(Response):
    """Answer of server-sent events. An error before the first token is answered with its own status."""

    def __init__(
        self,
        facade: Facade,
        request: Request,
        requests: Sequence[t.SampleRequest],
        dialect: str,
        writer: EventWriter,
        request_id: str = "",
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._facade = facade
        self._request = request
        self._requests = requests
        self._dialect = dialect
        self._writer = writer
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate the samples, and send their events as they grow."""
        async with self._facade.generating(self._request, self._requests, self._request_id) as group:
            # Read `ended` right after `new`: news that arrive while a slow client reads are not in `new`.
            new, ended = await group.news(), group.ended()
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            try:
                while not ended:
                    for part in _slices(new):
                        await _send(send, self._writer.events(part))
                    new, ended = await group.news(), group.ended()
                # Before the client can send its next request.
                self._facade.names.settle(group.outputs)
                for part in _slices(new):
                    await _send(send, self._writer.events(part))
                await _send(send, self._writer.last_events(group.outputs))
                last = b"data: [DONE]\n\n"
            except (PacelineError, ServiceError) as error:
                last = _line(http_error(error, names_in_body(self._request)).body)
            except Exception:
                log.exception("stream_failed")
                last = _line(fault().body)
            await send({"type": "http.response.body", "body": last, "more_body": False})
            self._facade.count(group.outputs, self._dialect)


def _slices(changed: Sequence[tuple[int, SampleOutput]]) -> Iterator[Sequence[tuple[int, SampleOutput]]]:
    """Yield the samples in parts whose events take milliseconds to write: an event may have all tokens so far."""
    begin = numbers = 0
    for place, (_, output) in enumerate(changed, 1):
        numbers += _NUMBERS_AN_EVENT + len(output.token_ids)
        if numbers >= _EVENT_NUMBERS_AT_ONCE or place == len(changed):
            yield changed[begin:place]
            begin, numbers = place, 0


async def _send(send: Send, events: Sequence[Json]) -> None:
    if events:
        body = b"".join(map(_line, events))
        await send({"type": "http.response.body", "body": body, "more_body": True})
        # Sending waits only for slow clients, so yield to other tasks here.
        await asyncio.sleep(0)


def names_in_body(request: Request) -> Mapping[str, str]:
    """Return the names of sampling parameters in the body of a request, where they differ from the SDK's."""
    return getattr(request.state, "names", {})


def _line(event: Json) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(event)
