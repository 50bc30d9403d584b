"""Check whether a response can be held to a JSON schema exactly.

The check is an allow-list of keywords and of their combinations. xgrammar's grammars ignore keywords that they do
not know and are not exact for all others, so everything that is allowed here was tried: a property test samples
such schemas and validates every generated text by them. Pure.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from functools import lru_cache
from itertools import chain, islice
from typing import Any

LONGEST_SCHEMA, DEEPEST_SCHEMA = 1 << 16, 64
"""Most bytes of a JSON schema, and its deepest nesting."""
MAX_FAULTS = 5
"""Most faults of a schema that are reported."""
_ANNOTATIONS = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
NOTES = frozenset(("$schema", "$comment", "discriminator", *_ANNOTATIONS))
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
"""Keywords that decide the form of a schema; without any, it allows any value."""
DEFINITIONS = ("$defs", "definitions")
"""Keywords of the root for schemas that `$ref` names."""
_ONE_OF = (
    "oneOf is supported where no value fits two of its schemas: they differ in type, in const or enum, or in the "
    "const of a required property; otherwise anyOf"
)
_ALL = frozenset(chain(*KEYWORDS.values()))

_LARGEST_NUMBER = 1 << 53
"""Largest whole number that every JSON reader reads exactly."""
_DECIMALS = 6
"""Most decimals of a bound of numbers."""
_FORMATS = ("uuid",)

Fault = tuple[str, str]
"""Place in a schema, such as `#/properties/a`, and what is wrong there."""

_REFERENCE = re.compile(r"#(?:/(\$defs|definitions)/([A-Za-z0-9_.-]+))?")
_TYPES = ("string", "number", "array", "object", "boolean", "null")
_MAX_STEPS = 64
_WITHIN = ("anyOf", "oneOf", "allOf")

LONGEST_PATTERN = 1024
# Without backslash and quote, which JSON must escape but a grammar writes unescaped.
_PLAIN = r'[^\\\[\](){}*+?|.^$"\x00-\x1f\x7f]'
_ESCAPED = r"\\[\^$*+?.()\[\]{}|/\-]"
_CLASS = r"\\[dws]"
_MEMBER = rf'(?:[^\\\[\]"\x00-\x1f\x7f]|{_ESCAPED})'
_SET = rf"\[(?:\^{_MEMBER}+|(?!\^)(?:{_MEMBER}|{_CLASS})+)\]"
_TIMES = r"(?:[*+?]|\{\d{1,3}(?:,\d{0,3})?\})?"
_PART = re.compile(
    rf"(?:(?P<open>\((?:\?:)?)|(?P<close>\){_TIMES})|(?P<bar>\|)|(?:{_SET}|{_ESCAPED}|{_CLASS}|\.|{_PLAIN}){_TIMES})"
)


@lru_cache(64)
def schema_faults(text: str) -> tuple[str, ...]:
    """Return the first faults of a schema, each with its place; empty: responses can be held to it exactly."""
    if len(text.encode("utf-8", "surrogatepass")) > LONGEST_SCHEMA:
        return (f"has more than {LONGEST_SCHEMA} bytes",)
    try:
        root = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
        # JSON can spell half of a surrogate pair, which is no text.
        json.dumps(root, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        return (f"is no JSON: {error}",)
    if not isinstance(root, dict):
        return ("is no JSON object",)
    if not _is_shallow(root):
        return (f"is nested more than {DEEPEST_SCHEMA} deep",)
    found = _SchemaChecker(root).faults()
    return tuple(f"at {place[:80]}: {fault}" for place, fault in islice(found, MAX_FAULTS))


class _SchemaChecker:
    """Check a schema and all schemas in it."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._alternatives = _Alternatives(root)

    def faults(self) -> Iterator[Fault]:
        """Yield the faults of the schema and of its definitions."""
        yield from self._schema(self._root, "#", is_root=True)
        for name in DEFINITIONS:
            defined = self._root.get(name, {})
            if not isinstance(defined, dict):
                yield "#", f"{name} must be an object"
                continue
            for key, schema in defined.items():
                yield from self._schema(schema, f"#/{name}/{key}")
        # Only now is every $ref known to lead somewhere.
        for reference in _circular_references(self._root):
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
            if _target_of(value, self._root) is None:
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
            if form == "oneOf" and sound and not self._alternatives.are_disjoint(value):
                yield place, _ONE_OF

    def _values(self, values: list[Any], form: str, schema: dict[str, Any], place: str) -> Iterator[Fault]:
        types = _as_list(schema.get("type", list(KEYWORDS)))
        if fault := _type_fault(types):
            yield place, fault
            return
        for value in values:
            if not any(_is_of(value, each) for each in types):
                yield place, f"{form} has {json.dumps(value)[:40]}, which is not of the type beside it"
            elif not _is_plain(value):
                yield place, f"{form} has whole numbers beyond 2**53, or numbers that are not finite"

    def _typed(self, schema: dict[str, Any], keys: list[str], place: str) -> Iterator[Fault]:
        types = _as_list(schema["type"])
        if fault := _type_fault(types):
            yield place, fault
            return
        allowed = frozenset(("type",)).union(*(KEYWORDS[each] for each in types))
        for key in keys:
            if key not in allowed:
                yield place, f"{key} does not go with type {json.dumps(schema['type'])}"
        if "string" in types:
            yield from _string_faults(schema, place)
        if "number" in types or "integer" in types:
            yield from _number_faults(schema, types, place)
        if "array" in types:
            yield from self._array(schema, place)
        if "object" in types:
            yield from self._object(schema, place)

    def _array(self, schema: dict[str, Any], place: str) -> Iterator[Fault]:
        yield from _count_faults(schema, "minItems", "maxItems", place)
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
        yield from _count_faults(schema, "minProperties", "maxProperties", place)
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


def _as_list(types: Any) -> list[Any]:
    return types if isinstance(types, list) else [types]


def _is_shallow(value: object) -> bool:
    """Return True if a JSON value is not nested too deep for compilers, which recurse."""
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


def _string_faults(schema: dict[str, Any], place: str) -> Iterator[Fault]:
    """Yield the faults of the keywords of a string."""
    yield from _count_faults(schema, "minLength", "maxLength", place)
    given = [key for key in ("pattern", "format") if key in schema]
    lengths = [key for key in ("minLength", "maxLength") if key in schema]
    if len(given) == 2 or (given and lengths):
        yield place, f"{given[0]} is not supported together with {(given[1:] + lengths)[0]}"
    if "pattern" in schema and (fault := pattern_fault(schema["pattern"])):
        yield place, f"pattern {fault}"
    if "format" in schema and schema["format"] not in _FORMATS:
        yield place, f"format is {schema['format']!r}; must be {' or '.join(_FORMATS)}, others by a pattern"


def _number_faults(schema: dict[str, Any], types: list[str], place: str) -> Iterator[Fault]:
    """Yield the faults of the bounds of a number, where `types` has number or integer."""
    decimals = 0 if "integer" in types else _DECIMALS
    least: list[Decimal] = []
    most: list[Decimal] = []
    for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        if key not in schema:
            continue
        value, step = schema[key], Decimal(10) ** -decimals
        known = _is_of(value, "number") and abs(value) <= _LARGEST_NUMBER
        if not known or Decimal(repr(value)) % step:
            allowed = "whole number" if "integer" in types else f"number of at most {_DECIMALS} decimals"
            yield place, f"{key} is {json.dumps(value)[:40]}; must be a {allowed} within 2**53"
            return
        within = step if key.startswith("exclusive") else 0
        if key in ("minimum", "exclusiveMinimum"):
            least.append(Decimal(repr(value)) + within)
        else:
            most.append(Decimal(repr(value)) - within)
    if least and most and max(least) > min(most):
        yield place, "allows no number: its minimum is above its maximum"


def _count_faults(schema: dict[str, Any], least: str, most: str, place: str) -> Iterator[Fault]:
    """Yield the faults of the keywords `least` and `most`, which bound a count."""
    given = {key: schema[key] for key in (least, most) if key in schema}
    wrong = [key for key, value in given.items() if type(value) is not int or value < 0]
    for key in wrong:
        yield place, f"{key} is {json.dumps(given[key])[:40]}; must be a whole number, 0 or more"
    if not wrong and given.get(least, 0) > given.get(most, math.inf):
        yield place, f"{least} is above {most}"


def _is_of(value: Any, name: Any) -> bool:
    """Return True if a value has the JSON type `name`."""
    if isinstance(value, bool) or value is None:
        return name == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return name == "number" or (name == "integer" and (isinstance(value, int) or value.is_integer()))
    return name == ("string" if isinstance(value, str) else "array" if isinstance(value, list) else "object")


def _is_plain(value: Any) -> bool:
    """Return True if every JSON reader reads the numbers in a value alike."""
    if isinstance(value, dict | list):
        return all(_is_plain(each) for each in (value.values() if isinstance(value, dict) else value))
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or abs(value) <= _LARGEST_NUMBER


def pattern_fault(pattern: Any) -> str:
    """Return the fault of a pattern; "" if there is none.

    A pattern must be anchored, since only whole strings are matched. It may have characters, sets, `.`, \\d, \\w,
    \\s, groups, alternatives in groups, and counts.
    """
    if not isinstance(pattern, str) or len(pattern) > LONGEST_PATTERN:
        return f"must be a string of at most {LONGEST_PATTERN} characters"
    if len(pattern) < 2 or pattern[0] != "^" or pattern[-1] != "$" or pattern[-2] == "\\":
        return "must begin with ^ and end with $"
    place, depth, last = 1, 0, len(pattern) - 1
    while place < last:
        part = _PART.match(pattern, place, last)
        if part is None:
            return f"has {pattern[place : place + 8]!r}, which is not supported"
        if part["bar"] and not depth:
            return "has alternatives outside of a group"
        depth += bool(part["open"]) - bool(part["close"])
        if depth < 0:
            return "closes a group that is not open"
        place = part.end()
    if depth:
        return "does not close a group"
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"is no regular expression: {error}"
    return ""


class _Alternatives:
    """Comparison of alternatives in one root.

    The values that a schema lists are computed once, since many places may refer to a long list.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._known: dict[int, tuple[set[str], set[str]] | None] = {}

    def are_disjoint(self, schemas: list[Any]) -> bool:
        """Return True if evidently no value fits two of these schemas.

        They differ in type, in the values that they list, or in the values of a property that all of them require.
        """
        resolved = [each for each in map(self._resolved, schemas) if each is not False]
        if len(set(map(id, resolved))) < len(resolved):
            # Two references lead to the same schema, so a value that fits one fits both.
            return False
        types = [self._types(schema) for schema in resolved]
        for kind in _TYPES:
            alike = [schema for schema, own in zip(resolved, types, strict=True) if kind in own]
            if len(alike) < 2 or _differ(map(self._values, alike)):
                continue
            shared = set.intersection(*map(_required, alike)) if kind == "object" else ()
            if not any(_differ(self._property_values(each, name) for each in alike) for name in shared):
                return False
        return True

    def _values(self, schema: Any) -> set[str] | None:
        """Return the values that a schema lists, each as JSON; None if it does not list them."""
        found = self._listed(schema)
        return None if found is None else found[0]

    def _property_values(self, schema: dict[str, Any], name: str) -> set[str] | None:
        """Return the values that a schema lists for a property; None if it does not list them."""
        if "properties" not in schema:
            return None
        return self._values(self._resolved(schema["properties"][name]))

    def _listed(self, schema: Any) -> tuple[set[str], set[str]] | None:
        """Return the values that a schema lists, and their types."""
        if not isinstance(schema, dict):
            return None
        if id(schema) not in self._known:
            listed = _listed_values(schema)
            self._known[id(schema)] = None if listed is None else (listed, set(map(_type_of, listed)))
        return self._known[id(schema)]

    def _resolved(self, schema: Any) -> Any:
        """Return a schema without the references and single alternatives around it; True behind too many."""
        for _ in range(_MAX_STEPS):
            if not isinstance(schema, dict):
                return schema
            if "$ref" in schema:
                schema = _target_of(schema["$ref"], self._root)
            elif isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1:
                schema = schema["allOf"][0]
            else:
                return schema
        return True

    def _types(self, schema: Any) -> set[str]:
        """Return the types of the values that fit a schema; integers are numbers."""
        found, seen, waiting = set[str](), set[int](), [schema]
        while waiting:
            each = self._resolved(waiting.pop())
            if id(each) in seen or each is False:
                continue
            seen.add(id(each))
            within = [key for key in _WITHIN if key in each] if isinstance(each, dict) else []
            if (listed := self._listed(each)) is not None:
                found |= listed[1]
            elif within:
                waiting += each[within[0]]
            elif isinstance(each, dict) and "type" in each:
                names = each["type"] if isinstance(each["type"], list) else [each["type"]]
                found.update("number" if name == "integer" else name for name in names)
            else:
                return set(_TYPES)
        return found


def _type_of(listed: str) -> str:
    first = listed[0]
    names = {'"': "string", "[": "array", "{": "object", "t": "boolean", "f": "boolean", "n": "null"}
    return names.get(first, "number")


def _listed_values(schema: Any) -> set[str] | None:
    """Return the values that a schema lists, each as JSON; None if it does not list them."""
    if isinstance(schema, dict) and "const" in schema:
        return {_as_json(schema["const"])}
    if isinstance(schema, dict) and isinstance(schema.get("enum"), list):
        return {_as_json(each) for each in schema["enum"]}
    return None


def _as_json(value: Any) -> str:
    """Return a value as JSON, the same for equal values: 1.0 is 1."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _required(schema: Any) -> set[str]:
    return set(schema.get("required", ())) if isinstance(schema, dict) else set()


def _differ(listed: Iterable[set[str] | None]) -> bool:
    """Return True if all schemas list their values, and no two list the same one."""
    seen = set[str]()
    for each in listed:
        if each is None or not seen.isdisjoint(each):
            return False
        seen |= each
    return True


def _target_of(reference: Any, root: dict[str, Any]) -> Any | None:
    """Return the schema that a `$ref` names; None if there is none."""
    found = _REFERENCE.fullmatch(reference) if isinstance(reference, str) else None
    if found is None:
        return None
    if found[1] is None:
        return root
    defined = root.get(found[1])
    return defined.get(found[2]) if isinstance(defined, dict) else None


def _circular_references(root: dict[str, Any]) -> Iterator[str]:
    """Yield a reference that leads back to itself within one value."""
    done: set[str] = set()
    for reference in sorted(set(_references(root, everywhere=True))):
        trail: list[tuple[str, Iterator[str]]] = [(reference, _direct_references(reference, root))]
        on_trail = {reference}
        while trail and reference not in done:
            name, following = trail[-1]
            then = next(following, None)
            if then is None:
                trail.pop()
                on_trail.discard(name)
                done.add(name)
            elif then in on_trail:
                yield then
                return
            elif then not in done:
                trail.append((then, _direct_references(then, root)))
                on_trail.add(then)


def _direct_references(reference: str, root: dict[str, Any]) -> Iterator[str]:
    return _references(_target_of(reference, root), everywhere=False)


def _references(schema: Any, *, everywhere: bool) -> Iterator[str]:
    """Yield the references in a schema, `everywhere` or only those that apply to its value as a whole."""
    if isinstance(schema, list):
        for each in schema:
            yield from _references(each, everywhere=everywhere)
    if not isinstance(schema, dict):
        return
    if isinstance(schema.get("$ref"), str):
        yield schema["$ref"]
    for key, each in schema.items():
        if everywhere or key in _WITHIN:
            yield from _references(each, everywhere=everywhere)
