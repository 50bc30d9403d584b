"""References and alternatives in JSON schemas: where they lead, and whether one value can fit two. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

_REFERENCE = re.compile(r"#(?:/(\$defs|definitions)/([A-Za-z0-9_.-]+))?")
_TYPES = ("string", "number", "array", "object", "boolean", "null")
_MOST_STEPS = 64
_WITHIN = ("anyOf", "oneOf", "allOf")


def target_of(reference: Any, root: dict[str, Any]) -> Any | None:
    """Return the schema that a `$ref` names; None if it names none."""
    found = _REFERENCE.fullmatch(reference) if isinstance(reference, str) else None
    if found is None:
        return None
    if found[1] is None:
        return root
    defined = root.get(found[1])
    return defined.get(found[2]) if isinstance(defined, dict) else None


def refers_to_itself(root: dict[str, Any]) -> Iterator[str]:
    """Yield the references that lead back to themselves within one value."""
    done: set[str] = set()
    for reference in sorted(set(_references(root, everywhere=True))):
        trail: list[tuple[str, Iterator[str]]] = [(reference, _led(reference, root))]
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
                trail.append((then, _led(then, root)))
                on_trail.add(then)


class ListedValues:
    """Values that the schemas of one root list, each as JSON, found once: many places may refer to a long list."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[set[str], set[str]] | None] = {}

    def of(self, schema: Any) -> set[str] | None:
        """Return the values that a schema lists; None if it does not list them."""
        found = self._found(schema)
        return None if found is None else found[0]

    def types(self, schema: Any) -> set[str] | None:
        """Return the types of those values."""
        found = self._found(schema)
        return None if found is None else found[1]

    def _found(self, schema: Any) -> tuple[set[str], set[str]] | None:
        if not isinstance(schema, dict):
            return None
        if id(schema) not in self._known:
            listed = _listed(schema)
            self._known[id(schema)] = None if listed is None else (listed, set(map(_type_of, listed)))
        return self._known[id(schema)]


def are_disjoint(schemas: list[Any], root: dict[str, Any], values: ListedValues) -> bool:
    """Return whether it is plain that no value fits two of some schemas.

    They differ in type, or in the values that they list, or in those of a property that all of them require.
    """
    resolved = [each for each in (_resolved(schema, root) for schema in schemas) if each is not False]
    if len(set(map(id, resolved))) < len(resolved):
        # Two references lead to the same schema, so a value that fits one fits both.
        return False
    types = [_types(schema, root, values) for schema in resolved]
    for kind in _TYPES:
        alike = [schema for schema, own in zip(resolved, types, strict=True) if kind in own]
        if len(alike) < 2 or _differ(values.of(each) for each in alike):
            continue
        shared = set.intersection(*(_required(each) for each in alike)) if kind == "object" else ()
        if not any(_differ(_listed_by(each, name, root, values) for each in alike) for name in shared):
            return False
    return True


def _led(reference: str, root: dict[str, Any]) -> Iterator[str]:
    return _references(target_of(reference, root), everywhere=False)


def _references(schema: Any, *, everywhere: bool) -> Iterator[str]:
    """Yield the references in a schema: those of parts of its value too, or of the value as a whole only."""
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


def _resolved(schema: Any, root: dict[str, Any]) -> Any:
    """Return a schema without the references and single alternatives around it; True behind too many."""
    for _ in range(_MOST_STEPS):
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema:
            schema = target_of(schema["$ref"], root)
        elif isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1:
            schema = schema["allOf"][0]
        else:
            return schema
    return True


def _types(schema: Any, root: dict[str, Any], values: ListedValues) -> set[str]:
    """Return the types of the values that fit a schema; integers are numbers."""
    found, seen, waiting = set[str](), set[int](), [schema]
    while waiting:
        each = _resolved(waiting.pop(), root)
        if id(each) in seen or each is False:
            continue
        seen.add(id(each))
        within = [key for key in _WITHIN if key in each] if isinstance(each, dict) else []
        if (listed := values.types(each)) is not None:
            found |= listed
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


def _listed(schema: Any) -> set[str] | None:
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


def _listed_by(
    schema: dict[str, Any], name: str, root: dict[str, Any], values: ListedValues
) -> set[str] | None:
    """Return the values that a schema lists for a property; None if it does not list them."""
    return values.of(_resolved(schema["properties"][name], root)) if "properties" in schema else None


def _differ(listed: Iterable[set[str] | None]) -> bool:
    """Return whether all schemas list their values, and no value is listed by two."""
    seen = set[str]()
    for each in listed:
        if each is None or not seen.isdisjoint(each):
            return False
        seen |= each
    return True
