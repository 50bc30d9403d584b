"""Routes whose bodies are read, checked and prepared by the desk before a handler gets them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, get_args

import grpc
from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from paceline.errors import DeadlineExceededError
from services.facade.dialects.body import Body
from services.facade.serving import Desk, Facade, client_left

_LEAST_SECONDS, _LEAST_RATE = 10.0, 256 * 1024
"""Deadline for the arrival of a body: so long, and a second for so many of its bytes."""
_WITHOUT_ROOM = 32 * 1024
"""Bytes of a body that come before room is made for all of it: who sends nothing takes nothing from others."""


class _PreparedRequest(Request):
    """Request whose JSON is the prepared body: FastAPI asks for it, and finds that it needs no more checks."""

    raw: bytes
    prepare: Callable[[], Awaitable[Body]]

    async def body(self) -> bytes:
        """Return whether there is a body: FastAPI would keep its bytes for as long as the request lasts."""
        return self.raw[:1]

    async def json(self) -> Body:
        """Return the prepared body."""
        try:
            return await self.prepare()
        except Exception as error:
            # FastAPI would take any other error for a mistake in the JSON.
            raise _Carried(error) from error


class _Carried(HTTPException):
    def __init__(self, error: Exception) -> None:
        super().__init__(500)
        self.error = error


def worked_router(facade: Facade, tag: str, prefix: str = "") -> APIRouter:
    """Return a router whose routes have prepared bodies; `tag` is their heading in the page of the API."""

    class WorkedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle, kind = super().get_route_handler(), _kind_of(self)
            if kind is None:
                return handle

            async def worked(request: Request) -> Response:
                prepared = _PreparedRequest(request.scope, request.receive)
                async with AsyncExitStack() as held:
                    prepared.raw = await _body_of(request, facade.desk, held)

                    async def prepare() -> Body:
                        raw, prepared.raw = prepared.raw, b""
                        limits = await facade.limits(request) if kind.of_model else None
                        body = await facade.desk.body(request, raw, kind, limits)
                        await held.aclose()
                        return body

                    prepared.prepare = prepare
                    try:
                        return await handle(prepared)
                    except _Carried as carried:
                        raise carried.error from None

            return worked

    return APIRouter(tags=[tag], prefix=prefix, route_class=WorkedRoute)


async def _body_of(request: Request, desk: Desk, held: AsyncExitStack) -> bytes:
    """Return the body; `held` gets the room that it takes, which is asked for when the body is seen to come."""
    told = request.headers.get("content-length", "")
    length = int(told) if told.isdigit() else 0
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
                    await held.enter_async_context(desk.room(request, length))
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
