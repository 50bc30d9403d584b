"""Routes of no other server: Paceline's hints and rewards, probes, version, metrics, and the page of the API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from typing import Any

from fastapi import APIRouter, Request
from jinja2 import Environment, StrictUndefined
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from paceline.errors import Violation
from paceline.transport.interface import Unary
from paceline.v1 import rollout_pb2
from services.contracts.errors import InvalidArgument
from services.facade.dialects import paceline
from services.facade.dialects.body import run_seed
from services.facade.dialects.forms import HintForm, RewardsForm, StatusForm, VersionForm, answered
from services.facade.gateway import ServedFleet
from services.facade.serving import Facade, body_router

Json = Mapping[str, Any]
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content-Security-Policy of the page."""
_SCHEMA = "#/components/schemas/"
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{{ title }}</title><style>
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem}
code{font-size:13px}h3{margin:2rem 0 .3rem}p{margin:.3rem 0;white-space:pre-line}
table{border-collapse:collapse;margin:.5rem 0;width:100%}
td,th{text-align:left;vertical-align:top;padding:.25rem .8rem .25rem 0;border-top:1px solid #8884}
td:last-child{white-space:pre-line}
</style></head><body>
<h1>{{ title }} {{ version }}</h1><p>{{ summary }}</p>
<p>The same as <a href="openapi.json">OpenAPI</a>.</p>
{%- macro types(kinds) %}
{%- for part, schema in kinds %}{{ " or " if not loop.first }}
{%- if schema %}<a href="#{{ schema }}">{{ part }}</a>{% else %}{{ part }}{% endif %}{% endfor %}{% endmacro %}
{%- macro rows(fields) %}{% if fields %}
<table><tr><th>field</th><th>type</th><th>default</th><th></th></tr>
{%- for each in fields %}
<tr><td><code>{{ each.name }}</code></td><td>{{ types(each.kinds) }}</td>
<td>{{ "required" if each.required else each.default }}</td><td>{{ each.text }}</td></tr>
{%- endfor %}</table>{% endif %}{% endmacro %}
{%- for tag, routes in sections %}
<h2>{{ tag }}</h2>
{%- for route in routes %}
<h3><code>{{ route.method }} {{ route.path }}</code></h3><p>{{ route.text }}</p>{{ rows(route.parameters) }}
{%- if route.body %}<p>Body: <a href="#{{ route.body }}">{{ route.body }}</a></p>{% endif %}
{%- if route.answer %}<p>Answer: {{ types(route.answer) }}</p>{% endif %}
{%- endfor %}{% endfor %}
<h2>Bodies and answers</h2>
{%- for name, text, fields in schemas %}
<h3 id="{{ name }}">{{ name }}</h3><p>{{ text }}</p>{{ rows(fields) }}
{%- endfor %}
</body></html>
"""


@dataclass(frozen=True, slots=True)
class ApiField:
    """Field of a body, or a parameter of a path. `kinds` are its types, each with the name of its schema or ""."""

    name: str
    kinds: list[tuple[str, str]]
    required: bool
    default: str
    text: str


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """Method and path, with its parameters, the name of its body's schema ("" for none) and the answer's types."""

    method: str
    path: str
    text: str
    parameters: list[ApiField] = field(default_factory=list)
    body: str = ""
    answer: list[tuple[str, str]] = field(default_factory=list)


def api_page(described: Json) -> str:
    """Return an OpenAPI description as one HTML page without links to other servers."""
    sections: dict[str, list[ApiRoute]] = {}
    for path, methods in described["paths"].items():
        for method, route in methods.items():
            sections.setdefault((route.get("tags") or ["Others"])[0], []).append(_route(method, path, route))
    schemas = described.get("components", {}).get("schemas", {})
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(_PAGE).render(
        title=described["info"]["title"],
        version=described["info"]["version"],
        summary=described["info"].get("summary", ""),
        sections=sections.items(),
        schemas=[
            (name, schema.get("description", ""), list(_fields(schema))) for name, schema in schemas.items()
        ],
    )


def _route(method: str, path: str, route: Json) -> ApiRoute:
    parameters = [
        _field(each["name"], each["schema"], each.get("required", False), each.get("description", ""))
        for each in route.get("parameters", ())
    ]
    content = route.get("requestBody", {}).get("content", {}).get("application/json", {})
    body = next((schema for _, schema in _kinds(content.get("schema", {})) if schema), "")
    answer = route.get("responses", {}).get("200", {}).get("content", {})
    answers = [kind for media in answer.values() for kind in _kinds(media.get("schema", {}))]
    return ApiRoute(method.upper(), path, route.get("description", ""), parameters, body, answers)


def _fields(schema: Json) -> Iterator[ApiField]:
    required = schema.get("required", ())
    for name, each in schema.get("properties", {}).items():
        yield _field(name, each, name in required, each.get("description", ""))


def _field(name: str, schema: Json, required: bool, text: str) -> ApiField:
    default = json.dumps(schema["default"]) if schema.get("default") is not None else ""
    return ApiField(name, list(_kinds(schema)), required, default, text)


def _kinds(schema: Json) -> Iterator[tuple[str, str]]:
    """Yield the possible types of a value, each with the name of its schema, or ""."""
    if target := schema.get("$ref", "").removeprefix(_SCHEMA):
        yield target, target
    elif choices := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        for each in choices:
            yield from _kinds(each)
    elif allowed := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        yield ", ".join(json.dumps(each) for each in allowed), ""
    elif schema.get("type") == "array":
        for kind, target in _kinds(schema.get("items", {})):
            yield f"list of {kind}", target
    else:
        yield str(schema.get("type", "any")), ""


def server_routes(registry: CollectorRegistry, described: Callable[[], dict[str, Any]]) -> APIRouter:
    """Return the routes of the server; `described` returns the OpenAPI description of all routes."""
    router = APIRouter(tags=["server"])
    page = cache(lambda: api_page(described()))

    @router.get("/version")
    async def version() -> VersionForm:
        """Return the version of Paceline, not of vLLM on the instances."""
        return VersionForm(version=metadata.version("paceline"))

    @router.get("/metrics", response_model=None, response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return the metrics of this facade in the format of Prometheus, as on its metrics port."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """Return the page of the API."""
        return HTMLResponse(page(), headers={"Content-Security-Policy": POLICY})

    return router


PROBES = {**answered(StatusForm), 503: {"model": StatusForm, "description": "Requests cannot be served"}}
"""Description of the answers of probes."""


def health_routes(fleet: ServedFleet) -> APIRouter:
    """Return the routes of probes."""
    router = APIRouter(tags=["health"], responses=PROBES)

    async def health() -> Response:
        """Answer 200 while a gateway leads and an instance serves or is paused."""
        return _answer(await fleet.problem(needs_instance=True))

    for path in ("/health", "/health/", "/health_generate"):
        router.get(path, response_model=None, include_in_schema=path == "/health")(health)

    @router.get("/readyz", response_model=None)
    async def ready() -> Response:
        """Answer 200 while a gateway leads. Weights can be updated then, even if no instance serves."""
        return _answer(await fleet.problem(needs_instance=False))

    @router.get("/livez", response_model=None)
    async def live() -> Response:
        """Answer 200 while this process answers."""
        return _answer("")

    return router


def _answer(problem: str) -> Response:
    if not problem:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": problem}, status_code=503, headers={"Retry-After": "1"})


def paceline_routes(facade: Facade) -> APIRouter:
    """Return the routes of hints and rewards."""
    router = body_router(facade, "Paceline", "/paceline/v1")

    @router.post("/hint")
    async def hint(body: paceline.HintBody, request: Request) -> HintForm:
        """Announce the prompts of a coming step, for idle instances; 0 samples if the hint cannot be used."""
        announced = rollout_pb2.HintNextBatchRequest.FromString(body.announced)
        announced.run_id, announced.run_seed = facade.run_id(request), _hinted_seed(facade, body.seed)
        facade.forecasts.announced(announced.run_id, announced.step)
        answer = await facade.client().call(Unary("Rollout", "HintNextBatch", announced))
        return HintForm(samples=answer.samples)

    @router.post("/rewards")
    async def rewards(body: paceline.RewardsBody, request: Request) -> RewardsForm:
        """Report rewards of finished samples, for the drafter; `matched` of them are known."""
        reported = rollout_pb2.ReportRewardsRequest.FromString(body.reported)
        reported.run_id = facade.run_id(request)
        answer = await facade.client().call(Unary("Rollout", "ReportRewards", reported))
        return RewardsForm(matched=answer.matched)

    return router


def _hinted_seed(facade: Facade, seed: int | None) -> int:
    """Return the seed of the announced requests, which default to the seed of the facade that they reach."""
    given = run_seed(seed)
    if given is None and not facade.config.alone:
        found = "is needed where there are several facades, and so in the requests to come"
        raise InvalidArgument([Violation("seed", found)])
    return facade.names.seed if given is None else given
