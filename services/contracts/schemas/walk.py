"""JSON schemas that samples can follow: an allow-list of keywords and of how they go together. Pure.

A response is held to its schema by a grammar of xgrammar's, which leaves out what it does not know and is not exact
in all that it knows. What is allowed here has been tried: a property test samples such schemas and validates every
text by them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain, islice
from typing import Any

from services.contracts.schemas.branches import ListedValues, are_disjoint, refers_to_itself, target_of
from services.contracts.schemas.limits import Fault, check_counts, check_number, check_string, is_of, is_plain

LONGEST_SCHEMA, DEEPEST_SCHEMA = 1 << 16, 64
"""Most bytes of a JSON schema, and how deep it may be nested."""
MOST_FAULTS = 5
"""Most faults of a schema that are named."""
_TOLD = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
NOTES = frozenset(("$schema", "$comment", "discriminator", *_TOLD))
"""Keywords that describe a value and allow or forbid nothing."""
KEYWORDS: dict[str, frozenset[str]] = {
    "string": frozenset(["minLength", "maxLength", "pattern", "format"]),
    "number": frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
    "integer": frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
    "array": frozenset(["items", "prefixItems", "minItems", "maxItems"]),
    "object": frozenset(["properties", "required", "additionalProperties", "minProperties", "maxProperties"]),
    "boolean": frozenset(),
    "null": frozenset(),
}
"""Types, and the keywords that go with each."""
FORMS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf", "type")
"""What a schema is: one of them, or nothing, which allows any value."""
DEFINITIONS = ("$defs", "definitions")
"""Where the root has schemas that `$ref` names."""
_ONE_OF = (
    "oneOf is supported where no value fits two of its schemas: they differ in type, in const or enum, or in the "
    "const of a required property; otherwise anyOf"
)
_ALL = frozenset(chain(*KEYWORDS.values()))


@lru_cache(64)
def schema_faults(text: str) -> tuple[str, ...]:
    """Return what is wrong with a schema, the first few faults, each with its place; none: it can be followed."""
    if len(text.encode("utf-8", "surrogatepass")) > LONGEST_SCHEMA:
        return (f"has more than {LONGEST_SCHEMA} bytes",)
    try:
        root = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
        # Half a character, which JSON can spell, is no text.
        json.dumps(root, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        return (f"is no JSON: {error}",)
    if not isinstance(root, dict):
        return ("is no JSON object",)
    if not _is_shallow(root):
        return (f"is nested more than {DEEPEST_SCHEMA} deep",)
    found = SchemaWalk(root).faults()
    return tuple(f"at {place[:80]}: {fault}" for place, fault in islice(found, MOST_FAULTS))


class SchemaWalk:
    """Walk through all schemas in one."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._listed = ListedValues()

    def faults(self) -> Iterator[Fault]:
        """Yield the faults of the schema and of those that it defines."""
        yield from self._schema(self._root, "#", is_root=True)
        for name in DEFINITIONS:
            defined = self._root.get(name, {})
            if not isinstance(defined, dict):
                yield "#", f"{name} must be an object"
                continue
            for key, schema in defined.items():
                yield from self._schema(schema, f"#/{name}/{key}")
        # Only now is every $ref known to lead somewhere.
        for reference in refers_to_itself(self._root):
            yield reference, "allows a value if it allows that value, which says nothing"

    def _schema(self, schema: Any, place: str, *, is_root: bool = False) -> Iterator[Fault]:
        if schema is True:
            return
        if schema is False:
            yield place, "false allows nothing"
            return
        if not isinstance(schema, dict):
            yield place, "must be an object or true"
            return
        keys = [key for key in schema if key not in NOTES and not (is_root and key in DEFINITIONS)]
        if unknown := [key for key in keys if key not in _ALL and key not in FORMS]:
            yield place, f"{unknown[0]} is not supported"
            return
        forms = [form for form in FORMS if form in schema]
        if not forms:
            if keys:
                yield place, f"{keys[0]} needs a type beside it"
            return
        form = forms[0]
        allowed = {form, "type"} if form in ("const", "enum") else {form}
        if form == "type":
            yield from self._typed(schema, keys, place)
        elif others := [key for key in keys if key not in allowed]:
            yield place, f"{others[0]} is not supported together with {form}"
        else:
            yield from self._form(form, schema, place)

    def _form(self, form: str, schema: dict[str, Any], place: str) -> Iterator[Fault]:
        value = schema[form]
        if form == "$ref":
            if target_of(value, self._root) is None:
                yield place, f"$ref must be # or name one of $defs, such as #/$defs/name; {value!r} does not"
        elif form == "const":
            yield from self._values([value], form, schema, place)
        elif not isinstance(value, list) or not value:
            yield place, f"{form} must be a list that is not empty"
        elif form == "enum":
            yield from self._values(value, form, schema, place)
        else:
            if form == "allOf" and len(value) > 1:
                yield place, f"allOf has {len(value)} schemas; one is supported"
                return
            sound = True
            for index, each in enumerate(value):
                for fault in self._schema(each, f"{place}/{form}/{index}"):
                    sound = False
                    yield fault
            if form == "oneOf" and sound and not are_disjoint(value, self._root, self._listed):
                yield place, _ONE_OF

    def _values(self, values: list[Any], form: str, schema: dict[str, Any], place: str) -> Iterator[Fault]:
        types = _listed(schema.get("type", list(KEYWORDS)))
        if fault := _type_fault(types):
            yield place, fault
            return
        for value in values:
            if not any(is_of(value, each) for each in types):
                yield place, f"{form} has {json.dumps(value)[:40]}, which is not of the type beside it"
            elif not is_plain(value):
                yield place, f"{form} has whole numbers beyond 2**53, or numbers that are not finite"

    def _typed(self, schema: dict[str, Any], keys: list[str], place: str) -> Iterator[Fault]:
        types = _listed(schema["type"])
        if fault := _type_fault(types):
            yield place, fault
            return
        allowed = frozenset(("type",)).union(*(KEYWORDS[each] for each in types))
        for key in keys:
            if key not in allowed:
                yield place, f"{key} does not go with type {json.dumps(schema['type'])}"
        if "string" in types:
            yield from check_string(schema, place)
        if "number" in types or "integer" in types:
            yield from check_number(schema, types, place)
        if "array" in types:
            yield from self._array(schema, place)
        if "object" in types:
            yield from self._object(schema, place)

    def _array(self, schema: dict[str, Any], place: str) -> Iterator[Fault]:
        yield from check_counts(schema, "minItems", "maxItems", place)
        first = schema.get("prefixItems", [])
        if "prefixItems" not in schema and schema.get("items", False) is False:
            yield place, 'an array needs items or prefixItems; with "items": true they may be anything'
        if "prefixItems" in schema and (not isinstance(first, list) or not first):
            yield place, "prefixItems must be a list that is not empty"
            return
        for index, each in enumerate(first):
            if each is True:
                yield f"{place}/prefixItems/{index}", "true is not supported here; {} allows anything, too"
            yield from self._schema(each, f"{place}/prefixItems/{index}")
        if first and _count(schema, "maxItems", len(first)) < len(first):
            yield place, f"maxItems is {schema['maxItems']}, and prefixItems lists {len(first)}"
        if schema.get("items", False) is not False:
            yield from self._schema(schema["items"], f"{place}/items")
            return
        if _count(schema, "minItems", 0) > len(first):
            yield place, f"minItems is {schema['minItems']}, and without items there are {len(first)}"

    def _object(self, schema: dict[str, Any], place: str) -> Iterator[Fault]:
        yield from check_counts(schema, "minProperties", "maxProperties", place)
        own, more = schema.get("properties", {}), schema.get("additionalProperties", False)
        if "properties" not in schema and "additionalProperties" not in schema:
            yield place, "an object needs properties or additionalProperties, which may be true"
        if not isinstance(own, dict):
            yield place, "properties must be an object"
            return
        if own and more is not False:
            yield place, "additionalProperties must be false beside properties: a name could come twice"
        if more is not False:
            yield from self._schema(more, f"{place}/additionalProperties")
            for key in ("minProperties", "maxProperties"):
                if key in schema:
                    yield place, f"{key} is not supported together with additionalProperties"
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
            yield place, "required must be a list of names"
        else:
            for name in required:
                if name not in own:
                    yield place, f"required has {json.dumps(name)[:40]}, which is not among properties"
            if _count(schema, "maxProperties", len(required)) < len(set(required)):
                yield place, f"maxProperties is {schema['maxProperties']}, and required lists {len(required)}"
        if more is False and _count(schema, "minProperties", 0) > len(own):
            yield place, f"minProperties is {schema['minProperties']}, and properties lists {len(own)}"
        for name, each in own.items():
            yield from self._schema(each, f"{place}/properties/{name}")


def _count(schema: dict[str, Any], key: str, default: int) -> int:
    value = schema.get(key, default)
    return value if isinstance(value, int) else default


def _type_fault(types: list[Any]) -> str:
    if types and all(isinstance(each, str) and each in KEYWORDS for each in types):
        return ""
    return f"type is {json.dumps(types)[:60]}; must be of {', '.join(KEYWORDS)}"


def _listed(types: Any) -> list[Any]:
    return types if isinstance(types, list) else [types]


def _is_shallow(value: object) -> bool:
    """Return whether a JSON value is nested as deep as a schema may be: compilers recurse."""
    level = [value]
    for _ in range(DEEPEST_SCHEMA + 1):
        nested = [each for each in level if isinstance(each, dict | list)]
        if not nested:
            return True
        level = list(
            chain.from_iterable(each.values() if isinstance(each, dict) else each for each in nested)
        )
    return False


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a name twice")
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number")
