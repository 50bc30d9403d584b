"""Common part of the routes of all dialects: samples of a request until its client leaves, and streamed answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline import AsyncClient
from paceline import types as t
from paceline.errors import PacelineError
from services.contracts.errors import ServiceError
from services.facade.config import FacadeConfig
from services.facade.dialects.asked import Limits, SamplesAsked
from services.facade.fleet import ServedFleet
from services.facade.forecasts import Forecasts
from services.facade.http_errors import fault, http_error
from services.facade.metrics import FacadeMetrics
from services.facade.names import GivenNames, SampleNames, given_names
from services.facade.samples import SampleGroup, SampleOutput, SamplesInWork
from services.facade.text import Tokenizer
from services.facade.work.answering import Write
from services.facade.work.desk import Desk, client_left
from services.platform.security.caller import current_caller
from services.platform.tasks import end

log = structlog.get_logger(__name__)

Json = dict[str, Any]

_NUMBERS_AT_ONCE = 8192
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
        if numbers >= _NUMBERS_AT_ONCE or place == len(changed):
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
