"""Page of the API, written from its OpenAPI description: it needs no network and runs no code of others. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, StrictUndefined

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
{%- macro rows(fields) %}{% if fields %}
<table><tr><th>field</th><th>type</th><th>default</th><th></th></tr>
{%- for each in fields %}
<tr><td><code>{{ each.name }}</code></td><td>
{%- for part, schema in each.kinds %}{{ " or " if not loop.first }}
{%- if schema %}<a href="#{{ schema }}">{{ part }}</a>{% else %}{{ part }}{% endif %}{% endfor %}</td>
<td>{{ "required" if each.required else each.default }}</td><td>{{ each.text }}</td></tr>
{%- endfor %}</table>{% endif %}{% endmacro %}
{%- for tag, routes in sections %}
<h2>{{ tag }}</h2>
{%- for route in routes %}
<h3><code>{{ route.method }} {{ route.path }}</code></h3><p>{{ route.text }}</p>{{ rows(route.parameters) }}
{%- if route.body %}<p>Body: <a href="#{{ route.body }}">{{ route.body }}</a></p>{% endif %}
{%- endfor %}{% endfor %}
<h2>Bodies</h2>
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
    """Method and path, with its parameters and the name of its body's schema, "" for none."""

    method: str
    path: str
    text: str
    parameters: list[ApiField] = field(default_factory=list)
    body: str = ""


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
    return ApiRoute(method.upper(), path, route.get("description", ""), parameters, body)


def _fields(schema: Json) -> Iterator[ApiField]:
    required = schema.get("required", ())
    for name, each in schema.get("properties", {}).items():
        yield _field(name, each, name in required, each.get("description", ""))


def _field(name: str, schema: Json, required: bool, text: str) -> ApiField:
    default = json.dumps(schema["default"]) if schema.get("default") is not None else ""
    return ApiField(name, list(_kinds(schema)), required, default, text)


def _kinds(schema: Json) -> Iterator[tuple[str, str]]:
    """Yield the types that a value may have, each with the name of the schema that describes it, if one does."""
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
