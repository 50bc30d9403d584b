"""JSON schemas: what is allowed, and what is refused by its keyword and place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.contracts import schemas
from services.contracts.schemas import (
    LONGEST_PATTERN,
    LONGEST_SCHEMA,
    MAX_FAULTS,
    pattern_fault,
    schema_faults,
)

INT, TEXT = {"type": "integer"}, {"type": "string"}


def node(**keywords: Any) -> dict[str, Any]:
    return {key.removesuffix("_"): value for key, value in keywords.items()}


def of(kind: str, **keywords: Any) -> dict[str, Any]:
    return {"type": kind, **node(**keywords)}


def closed(**properties: Any) -> dict[str, Any]:
    return of("object", properties=properties, required=sorted(properties), additionalProperties=False)


def defining(schema: dict[str, Any], **defined: Any) -> dict[str, Any]:
    return {**schema, "$defs": defined}


A, B = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}
REFUSED: list[tuple[Any, str, str]] = [
    # Two references to one schema.
    (defining(node(oneOf=[A] * 800), a=closed(**{f"p{n}": {"const": n} for n in range(240)})), "#", "oneOf"),
    # What a caller may have mistaken.
    (of("strange"), "#", "strange"),
    (of([]), "#", "type is []"),
    (node(type_=["string", 5]), "#", "type is"),
    (node(type_={}), "#", "type is"),
    (of("integer", minimum=5, maximum=3), "#", "minimum is above"),
    (of("integer", exclusiveMinimum=5, exclusiveMaximum=6), "#", "minimum is above"),
    (of("number", minimum=1, exclusiveMaximum=1), "#", "minimum is above"),
    (of("integer", minimum=1.5), "#", "minimum is 1.5"),
    (of("integer", exclusiveMinimum=True), "#", "exclusiveMinimum is true"),
    (of("number", maximum=0.1234567), "#", "6 decimals"),
    (of("number", maximum=2**53 + 1), "#", "2**53"),
    (of("number", maximum="3"), "#", "maximum is"),
    (node(enum=[]), "#", "enum must be a list that is not empty"),
    (node(enum="a"), "#", "enum must be a list"),
    (node(enum=[2**53 + 1]), "#", "2**53"),
    (of("string", enum=["a", 1]), "#", "enum has 1"),
    (of("string", const=5), "#", "const has 5"),
    (of("integer", const=True), "#", "const has true"),
    (node(anyOf=[]), "#", "anyOf must be a list that is not empty"),
    (node(oneOf={}), "#", "oneOf must be a list"),
    (of("string", minLength=5, maxLength=2), "#", "minLength is above maxLength"),
    (of("string", maxLength=-1), "#", "maxLength is -1"),
    (of("array", items=INT, minItems=2.0), "#", "minItems is 2.0"),
    (of("array", items=INT, minItems=True), "#", "minItems is true"),
    (of("array", prefixItems=[]), "#", "prefixItems must be a list"),
    (of("array", prefixItems=[INT], minItems=2), "#", "minItems is 2"),
    (of("array", prefixItems=[INT, INT], items=INT, maxItems=1), "#", "maxItems is 1"),
    (of("array", prefixItems=[True]), "#/prefixItems/0", "true is not supported"),
    (of("array", items=[INT]), "#/items", "must be an object"),
    (of("array", items=False), "#", "needs items or prefixItems"),
    (of("object", properties=[]), "#", "properties must be an object"),
    (of("object", properties=None, additionalProperties=True), "#", "properties must be an object"),
    (of("object", additionalProperties=0), "#/additionalProperties", "must be an object or true"),
    (of("object", properties={}, additionalProperties=None), "#/additionalProperties", "must be an object"),
    (of("array", prefixItems=None, items=INT), "#", "prefixItems must be a list"),
    (of("object", properties={"a": INT}, required=["a", "z"]), "#", '"z"'),
    (of("object", properties={"a": INT}, required="a"), "#", "required must be a list"),
    (
        of("object", properties={"a": INT, "b": INT}, required=["a", "b"], maxProperties=1),
        "#",
        "maxProperties is 1",
    ),
    (of("object", properties={"a": INT}, minProperties=2), "#", "minProperties is 2"),
    (of("object", properties={"a": False}), "#/properties/a", "false allows nothing"),
    (of("object", properties={"a": 3}), "#/properties/a", "must be an object"),
    (node(**{"$ref": "#/$defs/x"}), "#", "$ref must"),
    (node(**{"$ref": 5}), "#", "$ref must"),
    (node(**{"$ref": "http://x/y"}), "#", "$ref must"),
    (node(**{"$ref": "#/properties/a"}), "#", "$ref must"),
    (node(**{"$ref": "#/$defs/a~1b", "$defs": {"a/b": INT}}), "#", "$ref must"),
    (node(**{"$ref": "#name", "$defs": {"n": {"$anchor": "name"}}}), "#", "$ref must"),
    (node(**{"$ref": "#"}), "#", "says nothing"),
    (defining(A, a=B, b=node(anyOf=[A])), "#/$defs/", "says nothing"),
    (defining(of("object", properties={"const": A}), a=A), "#/$defs/a", "says nothing"),
    (node(**{"$defs": []}), "#", "$defs must be an object"),
    (node(**{"$defs": {"a": {"not": {}}}}), "#/$defs/a", "not is not supported"),
    # What a grammar does not follow.
    *(
        (node(**{key: {}}), "#", f"{key} is not supported")
        for key in ("not", "if", "then", "else", "$dynamicRef")
    ),
    *(
        (of("array", items=INT, **{key: 1}), "#", key)
        for key in ("uniqueItems", "contains", "unevaluatedItems")
    ),
    *(
        (of("integer", **{key: 3}), "#", f"{key} is not supported")
        for key in ("multipleOf", "nullable", "$id")
    ),
    *(
        (of("object", properties={}, **{key: {}}), "#", f"{key} is not supported")
        for key in ("patternProperties", "propertyNames", "dependentRequired", "dependentSchemas")
    ),
    (of("string", contentEncoding="base64"), "#", "contentEncoding"),
    *(
        (of("string", format=each), "#", f"format is '{each}'")
        for each in ("date", "date-time", "email", "ipv4")
    ),
    (of("string", format="uuid", maxLength=3), "#", "format is not supported together with maxLength"),
    (of("string", pattern="^a$", format="uuid"), "#", "pattern is not supported together with format"),
    (of("string", pattern="a"), "#", "pattern must begin"),
    # Keywords of a type where there is none, or another.
    (node(minimum=5), "#", "minimum needs a type"),
    (node(properties={}), "#", "properties needs a type"),
    (of("string", minimum=5), "#", "minimum does not go with type"),
    (node(type_=["string", "null"], items=INT), "#", "items does not go with type"),
    # Keywords that are followed alone.
    (defining({**A, "minimum": 5}, a=INT), "#", "minimum is not supported together with $ref"),
    (of("integer", enum=[1, 2], minimum=2), "#", "minimum is not supported together with enum"),
    (node(const=1, enum=[1]), "#", "enum is not supported together with const"),
    (of("integer", anyOf=[{"minimum": 3}]), "#", "type is not supported together with anyOf"),
    (node(allOf=[INT, {}]), "#", "allOf has 2"),
    (node(allOf=[]), "#", "allOf must be a list"),
    (of("object"), "#", "needs properties or additionalProperties"),
    (of("array"), "#", "needs items or prefixItems"),
    (
        of("object", properties={"a": INT}, additionalProperties=True),
        "#",
        "additionalProperties must be false",
    ),
    (of("object", additionalProperties=INT, minProperties=2), "#", "minProperties is not supported together"),
    # Alternatives that one value may fit.
    (node(oneOf=[INT, {"type": "number"}]), "#", "oneOf is supported where"),
    (node(oneOf=[INT, True]), "#", "oneOf is supported where"),
    (node(oneOf=[{"enum": ["a", "b"]}, {"enum": ["b"]}]), "#", "oneOf is supported where"),
    (node(oneOf=[{"const": 1}, {"const": 1.0}]), "#", "oneOf is supported where"),
    (node(oneOf=[{"const": {"a": [1]}}, {"const": {"a": [1.0]}}]), "#", "oneOf is supported where"),
    (node(oneOf=[{"const": "a"}, TEXT]), "#", "oneOf is supported where"),
    (node(oneOf=[closed(a=INT), closed(b=INT)]), "#", "oneOf is supported where"),
    (
        node(oneOf=[closed(k={"const": 1}), of("object", properties={"k": {"const": 2}})]),
        "#",
        "oneOf is supported",
    ),
    (defining(node(oneOf=[A, node(anyOf=[{"const": 5}, TEXT])]), a=INT), "#", "oneOf is supported where"),
]


@pytest.mark.parametrize(("schema", "place", "says"), REFUSED)
def test_what_would_not_be_followed_is_refused_with_keyword_and_place(
    schema: Any, place: str, says: str
) -> None:
    faults = schema_faults(json.dumps(schema))
    assert faults[0].startswith(f"at {place}")
    assert says in faults[0]
    deep = json.dumps(of("object", properties={"in": {"type": "array", "items": schema}}))
    if "$" not in json.dumps(schema):
        assert schema_faults(deep)[0].startswith(f"at #/properties/in/items{place[1:]}")


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"title": "any", "description": "d", "default": {"not": 1}, "examples": [1], "$comment": "c"},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", **of("array", items=True)},
        closed(
            name=TEXT, age=of("integer", minimum=0, maximum=150), score=of("number", minimum=0.5, maximum=1)
        ),
        of("object", properties={"a": INT}),
        of("object", additionalProperties=True),
        of("object", additionalProperties=False),
        node(anyOf=[of("string", pattern="^[A-Z]{2}$"), of("null")]),
        node(type_=["integer", "null"], minimum=3),
        of("array", prefixItems=[INT, TEXT], items=False, minItems=2),
        {
            "allOf": [{"$ref": "#/definitions/A"}],
            "title": "as pydantic 1 writes it",
            "definitions": {"A": INT},
        },
        {"$defs": {"T": closed(left=node(anyOf=[{"$ref": "#/$defs/T"}, of("null")]))}, "$ref": "#/$defs/T"},
        of("object", properties={"next": {"$ref": "#"}}),
        of("object", properties={"$ref": TEXT, "not": INT, "anyOf": INT, "": INT}),
        node(oneOf=[INT, TEXT, of("null"), closed(a=INT), of("array", items={}), of("boolean")]),
        node(oneOf=[node(enum=["a", "b"]), node(enum=["c"]), node(const=1), node(const=2.5)]),
        {
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            "discriminator": {"propertyName": "kind"},
            "$defs": {
                "Cat": closed(kind={"const": "cat"}),
                "Dog": closed(kind={"enum": ["dog", "puppy"]}, n=INT),
            },
        },
    ],
)
def test_what_a_sample_follows_is_allowed(schema: Any) -> None:
    assert schema_faults(json.dumps(schema)) == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no JSON"),
        ("[1]", "no JSON object"),
        ("true", "no JSON object"),
        ('{"type": "integer", "type": "string"}', "a name twice"),
        ('{"const": {"a": 1, "a": 2}}', "a name twice"),
        ('{"const": NaN}', "NaN is no number"),
        ('{"const": 1e999}', "not finite"),
        ('{"const": "\\ud83d"}', "no JSON"),
        (" " * LONGEST_SCHEMA + "{}", "bytes"),
        ('{"default":' * 65 + "1" + "}" * 65, "64 deep"),
    ],
)
def test_what_is_no_schema_is_refused(text: str, says: str) -> None:
    (fault,) = schema_faults(text)
    assert says in fault


def test_a_schema_costs_no_more_than_its_size() -> None:
    """Alternatives of alternatives, each named twice: all ways through them are 2 to the 600th."""
    count = 600
    twice = {f"a{i}": node(anyOf=[{"$ref": f"#/$defs/a{i + 1}"}] * 2) for i in range(count)}
    schema = node(oneOf=[{"$ref": "#/$defs/a0"}, TEXT]) | {"$defs": {**twice, f"a{count}": INT}}
    assert schema_faults(json.dumps(schema)) == ()
    schema["oneOf"].append({"type": "number"})
    assert "oneOf is supported where" in schema_faults(json.dumps(schema))[0]


def test_the_first_faults_are_named() -> None:
    wrong = of("object", properties={f"p{index}": {"not": {}} for index in range(9)})
    faults = schema_faults(json.dumps(wrong))
    assert [each.split(":")[0] for each in faults] == [
        f"at #/properties/p{index}" for index in range(MAX_FAULTS)
    ]


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("a$", "must begin"),
        ("^a", "must begin"),
        ("^", "must begin"),
        ("^a\\$", "must begin"),
        (5, "must be a string"),
        ("^" + "a" * LONGEST_PATTERN + "$", "at most 1024 characters"),
        ("^a|b$", "alternatives outside"),
        ("^(a$", "does not close"),
        ("^a)$", "closes a group"),
        ("^a^b$", "'^b$'"),
        ("^(a$)$", "'$)$'"),
        ("^(?=a)b$", "'?=a)b$'"),
        ("^(?i)b$", "'?i)b$'"),
        ("^\\ba$", "not supported"),
        ("^(a)\\1$", "not supported"),
        ("^\\p{L}$", "not supported"),
        ("^\\W$", "not supported"),
        ("^[^\\d]$", "not supported"),
        ("^\\t$", "not supported"),
        ("^\\\\$", "must begin"),
        ("^\\\\a$", "not supported"),
        ('^"$', "not supported"),
        ("^\n$", "not supported"),
        ("^[$", "not supported"),
        ("^a{,3}$", "not supported"),
        ("^a++$", "not supported"),
        ("^a{3,1}$", "no regular expression"),
        ("^[z-a]$", "no regular expression"),
        ("^a{4,}{2}$", "not supported"),
    ],
)
def test_a_pattern_that_would_mean_something_else_is_refused(pattern: Any, says: str) -> None:
    assert says in pattern_fault(pattern)


@pytest.mark.parametrize("pattern", ["^$", "^a*(b|c)+$", r"^\d{3}-\d{4}$", "^[a-zA-Z_]\\w*$", "^é{1,}$"])
def test_a_plain_pattern_is_allowed(pattern: str) -> None:
    assert pattern_fault(pattern) == ""


def test_a_list_that_many_places_refer_to_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[Any]()
    as_json = schemas._as_json
    monkeypatch.setattr(schemas, "_as_json", lambda value: [read.append(value), as_json(value)][1])
    alternatives = of("object", properties={f"p{n}": node(oneOf=[A, B]) for n in range(500)})
    schema = defining(alternatives, a=node(enum=[*range(1000)]), b=node(enum=[*range(1000, 2000)]))
    schema |= {"required": sorted(schema["properties"]), "additionalProperties": False}
    assert not schema_faults(json.dumps(schema))
    assert sorted(read) == [*range(2000)]
