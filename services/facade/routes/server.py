"""Routes about the server itself, where vLLM's has them: its version, its metrics, and the page of the API."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import metadata
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.responses import HTMLResponse, Response

from services.facade.api_page import POLICY, api_page


def server_routes(registry: CollectorRegistry, described: Callable[[], dict[str, Any]]) -> APIRouter:
    """Return the routes; `described` returns the OpenAPI description of all routes."""
    router = APIRouter(tags=["server"])
    page = cache(lambda: api_page(described()))

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Return the version of Paceline, not that of vLLM on the instances."""
        return {"version": metadata.version("paceline")}

    @router.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """Return the metrics of this facade as Prometheus reads them, the same as on its port of metrics."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """Return the page of the API."""
        return HTMLResponse(page(), headers={"Content-Security-Policy": POLICY})

    return router
