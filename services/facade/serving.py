"""Common part of the routes of all dialects: samples of a request until its client leaves, and streamed answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline import AsyncClient
from paceline import types as t
from paceline.errors import CancelledError, PacelineError
from services.contracts.errors import ServiceError
from services.facade.config import FacadeConfig
from services.facade.dialects.parameters import check_samples, check_whole_numbers
from services.facade.fleet import ServedFleet
from services.facade.http_errors import fault, http_error
from services.facade.metrics import FacadeMetrics
from services.facade.names import SampleNames, SamplesAsked, given_names
from services.facade.samples import SampleGroup, SampleOutput, SamplesInWork
from services.facade.text import Tokenizer
from services.platform.tasks import end

log = structlog.get_logger(__name__)

Json = dict[str, Any]

_TOKENS_AT_ONCE = 8192
"""Tokens of an answer that is written on the event loop; it takes about a microsecond each."""


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

    def run_id(self, request: Request) -> str:
        """Return the run of a request."""
        return given_names(request.headers, self.config.run_id).run_id

    async def requests(
        self, request: Request, asked: SamplesAsked, names: Mapping[str, str] | None = None
    ) -> list[t.SampleRequest]:
        """Return the samples that a request asks for, prompt by prompt.

        `names` are those of the dialect where they differ from `paceline.SamplingParams`. InvalidArgument: there
        are too many, whole numbers that cannot be sent, ids that the model does not have, or headers that do not
        fit.
        """
        request.state.names = names = names or {}
        model = await self.fleet.model()
        check_whole_numbers(asked.prompts, asked.sampling, names, model.vocab_size)
        check_samples(asked.prompts, asked.each, self.config.max_samples_per_request, names)
        given = given_names(request.headers, self.config.run_id)
        step = await self.fleet.recent_version() if given.step is None else given.step
        return self.names.requests(asked, given, step)

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

    async def answer(self, outputs: Sequence[SampleOutput], write: Callable[[], Any]) -> Response:
        """Return the answer that `write` gives; a large one is written in a thread, while others are served."""
        tokens = sum(len(output.token_ids) for output in outputs)
        if tokens > _TOKENS_AT_ONCE:
            body = await asyncio.to_thread(lambda: msgspec.json.encode(write()))
        else:
            body = msgspec.json.encode(write())
        return Response(body, media_type="application/json")

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
                    await _send(send, self._events.new(new))
                    new, ended = await group.news(), group.ended()
                # Before its client can come again.
                self._facade.names.settle(group.outputs)
                await _send(send, [*self._events.new(new), *self._events.last(group.outputs)])
                last = b"data: %b\n\n" % self._events.done.encode()
            except (PacelineError, ServiceError) as error:
                last = _line(http_error(error, names_in_body(self._request)).body)
            except Exception:
                log.exception("stream_failed")
                last = _line(fault().body)
            await send({"type": "http.response.body", "body": last, "more_body": False})
            self._facade.count(group.outputs, self._dialect)


async def _send(send: Send, events: Sequence[Json]) -> None:
    if events:
        body = b"".join(map(_line, events))
        await send({"type": "http.response.body", "body": body, "more_body": True})


def names_in_body(request: Request) -> Mapping[str, str]:
    """Return the names that a request's body has for sampling parameters, where they differ from the SDK's."""
    return getattr(request.state, "names", {})


def client_left() -> CancelledError:
    """Return the error of a request whose client has left; nobody reads it."""

    return CancelledError(grpc.StatusCode.CANCELLED, "the client has left")


def _line(event: Json) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(event)
