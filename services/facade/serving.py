"""Serve the requests of all dialects: read bodies, generate samples, and write answers.

Samples run until they have ended or the client leaves. An answer is whole or a stream of events. Bodies of a few
kilobytes and answers of a few thousand numbers are handled on the event loop, which takes milliseconds; `Desk`
gives all others to the workers. `Facade` has the collaborators of the routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import msgspec
import structlog
from fastapi.exceptions import RequestValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline import AsyncClient
from paceline import types as t
from paceline.errors import CancelledError, PacelineError
from services.contracts.errors import ServiceError
from services.facade.config import FacadeConfig
from services.facade.dialects.body import Body, Limits, SamplesAsked, as_it_is
from services.facade.gateway import Forecasts, ServedFleet
from services.facade.http_errors import fault, http_error
from services.facade.metrics import FacadeMetrics
from services.facade.names import GivenNames, SampleNames, given_names
from services.facade.samples import SampleGroup, SampleOutput, SamplesInWork
from services.facade.text import Tokenizer
from services.facade.work.jobs import Invalid, RefusedBody, Write, encoded, packed, prepared, size_of, written
from services.facade.work.pool import CallerTurns, WorkerPool
from services.platform.security.caller import current_caller
from services.platform.tasks import end

T = TypeVar("T")

BODY_AT_ONCE = 4 * 1024
"""Bytes of a body that is read on the event loop. It takes a millisecond or two, at worst (a thousand texts) 40."""
_NUMBERS_AT_ONCE = 8192
"""Numbers of an answer that is written on the event loop; it takes about a microsecond each."""
_BYTES_A_NUMBER = 16
_LARGE = 1024 * 1024
_SMALL = 64 * 1024
_BUDGET, _LARGE_BUDGET = 256 * 1024 * 1024, 64 * 1024 * 1024
"""Bytes of bodies up to a MiB, and of larger ones, that wait until they are prepared. One caller has half."""


class Desk:
    """Reads bodies and writes answers for the routes of a facade."""

    def __init__(self, tokenizer: Tokenizer | None = None, pool: WorkerPool | None = None) -> None:
        self._tokenizer = tokenizer
        self.pool = pool or WorkerPool()
        self._at_once = BODY_AT_ONCE if getattr(tokenizer, "fast", True) else 0
        self._bytes, self._large_bytes = (
            CallerTurns(_BUDGET, _BUDGET // 2),
            CallerTurns(_LARGE_BUDGET, _LARGE_BUDGET // 2),
        )

    @asynccontextmanager
    async def room(self, request: Request, length: int) -> AsyncIterator[None]:
        """Wait until there is room for a body of this length, until it is prepared; a small one needs none."""
        if length <= _SMALL:
            yield
            return
        turns = self._large_bytes if length > _LARGE else self._bytes
        async with turns.held(caller_of(request), length):
            yield

    async def body(self, request: Request, raw: bytes, kind: type[Body], limits: Limits | None) -> Body:
        """Return the prepared body of a request. InvalidArgument or RequestValidationError says what is wrong."""
        trusts = limits is not None and limits.trust_request_chat_template
        # A template may take its time, so it never gets the place that is kept for small bodies. Nor do the
        # variables of the model's own.
        template = trusts and _may_name(raw, b"chat_template")
        if len(raw) <= self._at_once and not template and not _may_name(raw, b"chat_template_kwargs"):
            found = prepared(self._tokenizer, raw, kind, limits)
        else:
            size = max(len(raw), _LARGE + 1) if template else len(raw)
            asked = self.pool.run(prepared, raw, kind, limits, size=size, caller=caller_of(request))
            found = await while_connected(request, asked)
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

        async def asked() -> Any:
            pieces = await packed(outputs)
            size_in_bytes, caller = size * _BYTES_A_NUMBER, caller_of(request)
            return await self.pool.run(written, pieces, write, size=size_in_bytes, caller=caller)

        return await while_connected(request, asked())


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of work, which is cancelled when the client of the request leaves."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise client_left()
        return working.result()
    finally:
        for each in (working, leaving):
            each.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    # The body was read, so what is received next is that the client has left.
    while (await request.receive())["type"] != "http.disconnect":
        pass


def client_left() -> CancelledError:
    """Return the error of a request whose client has left; nobody reads it."""
    return CancelledError(grpc.StatusCode.CANCELLED, "the client has left")


def _may_name(raw: bytes, name: bytes) -> bool:
    """Return True unless a body has no such name: it is there as it is, or with escapes."""
    return b'"%b"' % name in raw or b"\\u" in raw


def caller_of(request: Request) -> str:
    """Return who sends a request, as far as is known: the name of its token, or its address."""
    if (caller := current_caller()) is not None:
        return caller.name
    return request.client.host if request.client is not None else ""


log = structlog.get_logger(__name__)

Json = dict[str, Any]

_EVENT_NUMBERS_AT_ONCE = 8192
"""Numbers of the events that are written before others get their turn on the event loop."""
_NUMBERS_AN_EVENT = 128
"""Numbers that take as long as an event without any."""


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
    desk: Desk = field(default_factory=Desk)
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters of vLLM's dialect that a request leaves out."""

    def run_id(self, request: Request) -> str:
        """Return the run of a request; PermissionDenied if that is not the caller's."""
        return self._given(request).run_id

    def _given(self, request: Request) -> GivenNames:
        """Return the names in the headers of a request, of which no other place reads the run.

        One that names no run has the facade's, or else the one that the caller's token names in full. The gateway
        checks again: it is told for whom it is called.
        """
        caller = current_caller()
        default = self.config.run_id if caller is None else caller.run_or(self.config.run_id)
        given = given_names(request.headers, default)
        if caller is not None:
            caller.check_run(given.run_id)
        return given

    async def limits(self, request: Request) -> Limits:
        """Return what the body of a request is checked against. UnavailableError: no instance is known."""
        model, config = await self.fleet.model(), self.config
        return Limits(
            model.name,
            model.vocab_size,
            model.max_model_len,
            config.logprobs_mode,
            config.max_samples_per_request,
            config.max_hinted_samples,
            config.trust_request_chat_template,
            self._given(request).prefix or 0,
            self.defaults,
        )

    async def requests(self, request: Request, asked: SamplesAsked) -> list[t.SampleRequest]:
        """Return the samples that a request asks for, prompt by prompt.

        InvalidArgument: headers do not fit. PermissionDenied: the run is not the caller's.
        """
        given = self._given(request)
        step = await self.fleet.recent_version() if given.step is None else given.step
        found = self.names.requests(asked, given, step)
        self.forecasts.asked(found)
        return found

    @asynccontextmanager
    async def generating(
        self, request: Request, requests: Sequence[t.SampleRequest], request_id: str = ""
    ) -> AsyncIterator[SampleGroup]:
        """Generate samples; they end when the context is left, or the client leaves."""
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
        """Return the samples once all have ended."""
        async with self.generating(request, requests, request_id) as group:
            found = await group.wait()
        self.count(found, dialect)
        return found

    async def answer(self, request: Request, outputs: Sequence[SampleOutput], write: Write) -> Response:
        """Return the answer that `write` gives."""
        body = await self.desk.answer(request, outputs, write)
        return Response(
            memoryview(body) if isinstance(body, bytearray) else body, media_type="application/json"
        )

    async def _end_with_client(self, request: Request, group: SampleGroup) -> None:
        # The body was read, so what is received next is that the client has left.
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.metrics.disconnects.inc()
        await group.fail(client_left())

    def count(self, outputs: Sequence[SampleOutput], dialect: str) -> None:
        """Count the tokens of an answer."""
        self.metrics.tokens.labels(dialect).inc(sum(len(output.token_ids) for output in outputs))


@dataclass(frozen=True, slots=True)
class EventStream:
    """The events of an answer, as a dialect writes them."""

    new: Callable[[Sequence[tuple[int, SampleOutput]]], list[Json]]
    """Returns the events of the samples that have changed, which come with their places."""
    last: Callable[[Sequence[SampleOutput]], list[Json]]
    """Returns those that follow the samples."""
    done: str = "[DONE]"


class EventResponse(Response):
    """An answer of server-sent events. An error before the first token is an answer of its own."""

    def __init__(
        self,
        facade: Facade,
        request: Request,
        requests: Sequence[t.SampleRequest],
        dialect: str,
        events: EventStream,
        request_id: str = "",
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._facade = facade
        self._request = request
        self._requests = requests
        self._dialect = dialect
        self._events = events
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate the samples and send them as they grow."""
        async with self._facade.generating(self._request, self._requests, self._request_id) as group:
            # Both at one moment: what comes while the client takes its time is not in `new`.
            new, ended = await group.news(), group.ended()
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            try:
                while not ended:
                    for part in _slices(new):
                        await _send(send, self._events.new(part))
                    new, ended = await group.news(), group.ended()
                # Before its client can come again.
                self._facade.names.settle(group.outputs)
                for part in _slices(new):
                    await _send(send, self._events.new(part))
                await _send(send, self._events.last(group.outputs))
                last = b"data: %b\n\n" % self._events.done.encode()
            except (PacelineError, ServiceError) as error:
                last = _line(http_error(error, names_in_body(self._request)).body)
            except Exception:
                log.exception("stream_failed")
                last = _line(fault().body)
            await send({"type": "http.response.body", "body": last, "more_body": False})
            self._facade.count(group.outputs, self._dialect)


def _slices(changed: Sequence[tuple[int, SampleOutput]]) -> Iterator[Sequence[tuple[int, SampleOutput]]]:
    """Yield the samples in parts whose events take some milliseconds: an event may have all tokens so far."""
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
        # Sending waits only for a client that reads slowly.
        await asyncio.sleep(0)


def names_in_body(request: Request) -> Mapping[str, str]:
    """Return the names that a request's body has for sampling parameters, where they differ from the SDK's."""
    return getattr(request.state, "names", {})


def _line(event: Json) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(event)
