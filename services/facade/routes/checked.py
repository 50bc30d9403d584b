"""Route whose body is checked before anything else reads it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from services.facade.dialects.unicode import check_unicode


class CheckedRoute(APIRoute):
    """Route whose body has no text that is no Unicode."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def checked(request: Request) -> Response:
            check_unicode(await request.body())
            return await handle(request)

        return checked


def checked_router(tag: str, prefix: str = "") -> APIRouter:
    """Return a router of such routes; `tag` is their heading in the page of the API."""
    return APIRouter(tags=[tag], prefix=prefix, route_class=CheckedRoute)
