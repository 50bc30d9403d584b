"""Reading of bodies and writing of answers: small ones at once, all others in the workers.

What is done at once takes milliseconds: a body of a few kilobytes, whose text a fast tokenizer reads, or an answer
of a few thousand numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
from fastapi.exceptions import RequestValidationError
from starlette.requests import Request

from paceline.errors import CancelledError
from services.facade.dialects.asked import Limits
from services.facade.dialects.parameters import Body, as_it_is
from services.facade.samples import SampleOutput
from services.facade.text import Tokenizer
from services.facade.work.answering import Write, encoded, packed, size_of, written
from services.facade.work.bodies import Invalid, RefusedBody, prepared
from services.facade.work.pool import WorkerPool
from services.facade.work.turns import CallerTurns
from services.platform.security.caller import current_caller

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
