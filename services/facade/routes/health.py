"""Probes, which need no token."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from services.facade.fleet import ServedFleet


def health_routes(fleet: ServedFleet) -> APIRouter:
    """Return the routes of probes."""
    router = APIRouter(tags=["health"])

    async def health() -> Response:
        """Answer 200 while a gateway leads and an instance serves, or is paused."""
        return _answer(await fleet.problem(needs_instance=True))

    for path in ("/health", "/health/", "/health_generate"):
        router.get(path, include_in_schema=path == "/health")(health)

    @router.get("/readyz")
    async def ready() -> Response:
        """Answer 200 while a gateway leads; weights can be updated then, even where no instance serves."""
        return _answer(await fleet.problem(needs_instance=False))

    @router.get("/livez")
    async def live() -> Response:
        """Answer 200 while this process answers."""
        return _answer("")

    return router


def _answer(problem: str) -> Response:
    if not problem:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": problem}, status_code=503, headers={"Retry-After": "1"})
