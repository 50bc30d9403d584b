"""Page of the API: what the description has, escaped, and nothing from elsewhere."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from services.facade.app import app
from services.facade.config import FacadeConfig
from services.facade.routes.paceline import api_page

DESCRIBED = {
    "info": {"title": "T", "version": "1", "summary": "<b>"},
    "paths": {
        "/a": {
            "post": {
                "tags": ["one"],
                "description": "Does & says.",
                "responses": {
                    "200": {
                        "content": {
                            "application/json": {
                                "schema": {"type": "array", "items": {"$ref": "#/components/schemas/Part"}}
                            }
                        }
                    }
                },
                "requestBody": {
                    "content": {
                        "application/json": {
                            "schema": {"anyOf": [{"$ref": "#/components/schemas/Body"}, {"type": "null"}]}
                        }
                    }
                },
            }
        },
        "/b": {
            "get": {
                "parameters": [
                    {"name": "mode", "schema": {"enum": ["x", "y"], "default": "x"}, "description": "How."}
                ]
            }
        },
    },
    "components": {
        "schemas": {
            "Body": {
                "description": "A body.",
                "required": ["ids"],
                "properties": {
                    "ids": {"type": "array", "items": {"type": "integer"}},
                    "part": {"anyOf": [{"$ref": "#/components/schemas/Part"}, {"type": "string"}]},
                    "n": {"type": "integer", "default": 1, "description": "Count <1>."},
                },
            },
            "Part": {"type": "object"},
        }
    },
}


def test_routes_fields_types_and_defaults_are_told() -> None:
    page = " ".join(api_page(DESCRIBED).split())
    assert "<code>POST /a</code></h3><p>Does &amp; says.</p>" in page
    assert 'Body: <a href="#Body">Body</a>' in page
    assert 'Answer: <a href="#Part">list of Part</a>' in page
    assert "<code>ids</code></td><td>list of integer</td> <td>required</td>" in page
    assert '<a href="#Part">Part</a> or string</td>' in page
    assert "<code>n</code></td><td>integer</td> <td>1</td><td>Count &lt;1&gt;.</td>" in page
    assert "<h2>Others</h2> <h3><code>GET /b</code>" in page
    assert "<code>mode</code></td><td>&#34;x&#34;, &#34;y&#34;</td> <td>&#34;x&#34;</td><td>How.</td>" in page
    assert 'id="Body">Body</h3><p>A body.</p>' in page
    assert "&lt;b&gt;" in page
    assert "://" not in page


def test_every_answer_has_a_form_and_nothing_is_from_elsewhere() -> None:
    """Integration tests compare each answer that they get with these forms."""
    described = app(FacadeConfig(), CollectorRegistry()).openapi()
    for path, methods in described["paths"].items():
        for route in methods.values():
            content = route["responses"]["200"].get("content", {})
            schemas = [each["schema"] for each in content.values()]
            assert schemas or path == "/reset_prefix_cache", path  # which has an empty answer
            assert all("$ref" in each or "anyOf" in each or each.get("type") == "string" for each in schemas)
            assert "422" not in route["responses"], path
    for name, schema in described["components"]["schemas"].items():
        assert schema.get("description"), name
    page = api_page(described)
    assert "://" not in page
    assert "<script" not in page
