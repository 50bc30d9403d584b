"""Names and origins of requests that need no token."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from paceline.tokens import TokenScope
from services.facade.access import Origins
from services.facade.config import FacadeConfig

HERE = "127.0.0.1:7480"
ANONYMOUS = {"token": "t", "anonymous_scopes": frozenset({TokenScope.ROLLOUTS})}
EVERYWHERE = {"host": "0.0.0.0", "insecure": True}


async def answered(
    settings: dict[str, Any], headers: list[tuple[str, str]], path: str = "/pause", method: str = "POST"
) -> tuple[int, str]:
    """Return the status, and the code of the error."""
    inner = Starlette(
        routes=[
            Route(each, lambda _: PlainTextResponse("done"), methods=["GET", "POST"])
            for each in ("/pause", "/pause_generation", "/health", "/flush_cache")
        ]
    )
    transport = httpx.ASGITransport(app=Origins(inner, FacadeConfig(**settings)))
    async with httpx.AsyncClient(transport=transport, base_url="http://unused") as http:
        request = httpx.Request(method, f"http://unused{path}", headers=headers)
        request.headers = httpx.Headers(headers)
        response = await http.send(request)
    code = "" if response.status_code == 200 else response.json()["error"]["code"]
    return response.status_code, code


@pytest.mark.parametrize(
    ("settings", "host"),
    [
        ({}, HERE),
        ({}, "127.0.0.1"),
        ({}, "127.9.9.9:1"),
        ({}, "localhost:7480"),
        ({}, "LocalHost"),
        ({}, "localhost."),
        ({}, "[::1]:7480"),
        (ANONYMOUS, "localhost"),
        ({"advertise_host": "facade.ml.svc"}, "facade.ml.svc:7480"),
        ({"allowed_hosts": ["rollouts.example.com"]}, "Rollouts.Example.com"),
        ({"allowed_hosts": ["*.example.com"]}, "a.example.com:80"),
        ({"allowed_hosts": ["*"]}, "evil.example"),
        (EVERYWHERE, "10.1.2.3:7480"),
        (EVERYWHERE, "[2001:db8::1]:7480"),
        # A token says enough.
        ({"token": "t"}, "evil.example"),
    ],
)
async def test_a_name_of_this_server_is_served(settings: dict[str, Any], host: str) -> None:
    assert await answered(settings, [("host", host)]) == (200, "")


@pytest.mark.parametrize(
    ("settings", "hosts"),
    [
        ({}, ["evil.example"]),
        ({}, ["localhost.evil.example"]),
        ({}, ["evil.example#localhost"]),
        ({}, ["localhost@evil.example"]),
        ({}, ["evil.example@localhost"]),
        ({}, ["127.0.0.1.evil.example"]),
        ({}, ["10.1.2.3"]),
        ({}, ["0.0.0.0"]),
        ({}, ["[::1"]),
        ({}, ["localhost, evil.example"]),
        ({}, ["localhost", "evil.example"]),
        ({}, [""]),
        ({}, []),
        (ANONYMOUS, ["evil.example"]),
        ({"allowed_hosts": ["*.example.com"]}, ["example.com.evil.example"]),
        (EVERYWHERE, ["evil.example"]),
    ],
)
async def test_any_other_name_is_refused(settings: dict[str, Any], hosts: list[str]) -> None:
    assert await answered(settings, [("host", each) for each in hosts]) == (421, "UNKNOWN_HOST")


@pytest.mark.parametrize(
    ("headers", "good"),
    [
        ([("origin", f"http://{HERE}")], True),
        ([("sec-fetch-site", "same-origin")], True),
        ([("sec-fetch-site", "none")], True),
        ([("origin", "http://evil.example")], False),
        ([("origin", "http://127.0.0.1:3000")], False),
        ([("origin", "http://127.0.0.1")], False),
        ([("origin", "http://localhost:7480")], False),
        ([("origin", "null")], False),
        ([("origin", "")], False),
        ([("origin", "file://")], False),
        ([("origin", f"http://{HERE}/x")], False),
        ([("origin", f"http://{HERE}"), ("origin", "http://evil.example")], False),
        ([("sec-fetch-site", "cross-site")], False),
        ([("sec-fetch-site", "same-site")], False),
        ([("origin", f"http://{HERE}"), ("sec-fetch-site", "cross-site")], False),
    ],
)
@pytest.mark.parametrize(("path", "method"), [("/pause", "POST"), ("/flush_cache", "GET")])
async def test_a_page_of_another_origin_is_refused(
    headers: list[tuple[str, str]], good: bool, path: str, method: str
) -> None:
    found = await answered({}, [("host", HERE), *headers], path, method)
    assert found == ((200, "") if good else (403, "CROSS_ORIGIN"))


async def test_what_needs_a_token_and_what_anybody_may_read_is_left_alone() -> None:
    evil = [("host", "evil.example"), ("origin", "http://evil.example")]
    assert await answered({"token": "t"}, evil) == (200, "")
    assert await answered(ANONYMOUS, [*evil, ("authorization", "Bearer t")]) == (200, "")
    assert await answered({}, evil, "/health", "GET") == (200, "")
    # Without a token in force the header says nothing.
    assert await answered({}, [*evil, ("authorization", "Bearer t")]) == (421, "UNKNOWN_HOST")


async def test_an_origin_of_the_usual_port_has_none() -> None:
    for named in ("localhost", "localhost:80"):
        for origin in ("http://localhost", "http://localhost:80"):
            assert await answered({}, [("host", named), ("origin", origin)]) == (200, "")
