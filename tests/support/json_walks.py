"""JSON schemas of all that is allowed, and texts that the grammar of one lets a model write."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import xgrammar
from hypothesis import strategies as st

from services.generation.engine.grammars import Grammars, masks_for

# Every character of JSON, pieces of it, parts of characters, and what no JSON may have as it is.
TOKENS: list[bytes] = [
    *(bytes([each]) for each in range(32, 127)),
    *(b"\n", b"\t", b"\r", b"\x00", b"\x1f", b"\x7f", b"\xc3", b"\xa9", "é".encode(), "😀".encode()),
    *(b"\\u0061", b'\\"', b"\\n", b"\n\n", b"a\t", b"true", b"null", b"12"),
    *(b'"a"', b'": ', b'": "', b'",', b"{}", b"[]"),
]
STOP = len(TOKENS)
_CLOSING = {TOKENS.index(each) for each in (b'"', b"}", b"]", b"{}", b"[]", b'"a"', b"0")}
_SPACE = {index for index, token in enumerate(TOKENS) if not token.strip()}


def vocabulary(tokens: Sequence[bytes] = TOKENS) -> Any:
    """Return tokens, and one more that ends a sample, as a model's."""
    return xgrammar.TokenizerInfo(
        [*tokens, b"<end>"], xgrammar.VocabType.RAW, vocab_size=len(tokens) + 1, stop_token_ids=[len(tokens)]
    )


def finished_text(grammars: Grammars, schema: str, rng: random.Random, most: int = 120) -> bytes | None:
    """Return a text that ends within so many tokens, each drawn from those allowed; None if none does."""
    state, masks = grammars.begin(schema, [STOP]), masks_for(1, STOP + 1)
    response: list[int] = []
    while len(response) < most:
        state.fill(response, [], masks, 0)
        bits = masks[0].numpy().view("uint32")
        allowed = [token for token in range(STOP + 1) if bits[token // 32] >> (token % 32) & 1]
        if STOP in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return b"".join(TOKENS[token] for token in response)
        allowed = [token for token in allowed if token != STOP]
        if not allowed:
            return None
        written = [token for token in allowed if token not in _SPACE]
        closing = [token for token in written if token in _CLOSING]
        if closing and rng.random() < (0.3 if len(response) < most / 4 else 0.9):
            written = closing
        response.append(rng.choice(written if written and rng.random() < 0.9 else allowed))
    return None


NAMES = st.sampled_from(["a", "b", "ab", "é", 'q"', "back\\slash", "", "x y", "\n", "type", "$ref", "const"])
WHOLE = st.integers(-30, 30) | st.integers(-(2**53), 2**53)
DECIMAL = WHOLE | st.integers(-3 * 10**7, 3 * 10**7).map(lambda each: each / 10**6)
_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), WHOLE, _FLOATS, NAMES, st.text(max_size=5)),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(NAMES, each, max_size=3),
    max_leaves=4,
)
PATTERNS = st.sampled_from(
    [
        *(
            "^[a-z]{2,4}$",
            "^(a|b)*c?$",
            r"^\d+(\.\d{1,2})?$",
            "^[^a]{3}$",
            "^é+$",
            r"^\w\s\w$",
            "^.{0,3}$",
            "^$",
        ),
        *(
            r"^\$\d{1,3}$",
            r"^[\]\-^]{2}$",
            "^(?:ab|cd){2}x*$",
            r"^[\d.,]{1,5}$",
            "^[^0-9 ]+$",
            r"^\/[a-z\/]*$",
        ),
    ]
)


def _with_some(draw: st.DrawFn, keywords: dict[str, st.SearchStrategy[Any]]) -> dict[str, Any]:
    return {key: draw(each) for key, each in keywords.items() if draw(st.booleans())}


@st.composite
def _strings(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["plain", "length", "pattern", "format"]))
    if kind == "length":
        least, more = draw(st.integers(0, 6)), draw(st.integers(0, 6))
        limits = {"minLength": least, "maxLength": least + more}
        return {"type": "string", **_with_some(draw, {key: st.just(each) for key, each in limits.items()})}
    more_of = {"pattern": PATTERNS, "format": st.just("uuid")}
    return {"type": "string"} | ({kind: draw(more_of[kind])} if kind in more_of else {})


@st.composite
def _numbers(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["integer", "number"]))
    values = WHOLE if kind == "integer" else DECIMAL
    keys = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    return {"type": kind, **_with_some(draw, dict.fromkeys(keys, values))}


@st.composite
def _arrays(draw: st.DrawFn, each: st.SearchStrategy[Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(each, min_size=1, max_size=3))
    if "prefixItems" not in schema or draw(st.booleans()):
        schema["items"] = draw(each | st.just(False)) if "prefixItems" in schema else draw(each)
    return schema | _with_some(draw, {"minItems": st.integers(0, 3), "maxItems": st.integers(0, 5)})


@st.composite
def _objects(draw: st.DrawFn, each: st.SearchStrategy[Any]) -> dict[str, Any]:
    if draw(st.booleans()):
        return {"type": "object", "additionalProperties": draw(each | st.booleans())}
    own = draw(st.dictionaries(NAMES, each, max_size=4))
    limits = {"minProperties": st.integers(0, 3), "maxProperties": st.integers(0, 4)}
    rest = {"required": st.lists(st.sampled_from(sorted(own)), unique=True) if own else st.just([])}
    closed = {"additionalProperties": st.just(False) | each}
    return {"type": "object", "properties": own, **_with_some(draw, rest | limits | closed)}


_MIXED = st.lists(
    st.sampled_from(["string", "integer", "number", "boolean", "null"]), min_size=1, unique=True
)
_LEAVES = st.one_of(
    *(st.just({"type": kind}) for kind in ("boolean", "null")),
    st.booleans().map(lambda _: True),
    st.just({"title": "anything", "default": 3}),
    _strings(),
    _numbers(),
    st.builds(lambda types, least: {"type": types, "minimum": least, "maxLength": 4}, _MIXED, WHOLE),
    st.lists(VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    VALUES.map(lambda value: {"const": value}),
    st.lists(NAMES, min_size=1).map(lambda names: {"type": "string", "enum": names}),
    st.sampled_from(["#", "#/$defs/one", "#/$defs/two", "#/definitions/3"]).map(lambda to: {"$ref": to}),
)


def _combined(each: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(each, min_size=1, max_size=3)
    choice = st.sampled_from(["x", "y", "z"])
    marked = st.lists(st.tuples(choice, each), min_size=1, max_size=3, unique_by=lambda pair: pair[0])
    return st.one_of(
        several.map(lambda schemas: {"anyOf": schemas}),
        several.map(lambda schemas: {"oneOf": schemas}),
        marked.map(lambda pairs: {"oneOf": [_marked(*pair) for pair in pairs]}),
        each.map(lambda schema: {"allOf": [schema], "description": "one"}),
        _arrays(each),
        _objects(each),
    )


def _marked(kind: str, schema: Any) -> dict[str, Any]:
    properties = {"kind": {"const": kind}, "more": schema}
    return {"type": "object", "properties": properties, "required": ["kind"]}


_NODES = st.recursive(_LEAVES, _combined, max_leaves=6)


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a schema of allowed keywords; not all of them go together."""
    root = draw(_NODES.filter(lambda node: isinstance(node, dict)))
    named = {"one": draw(_NODES), "two": draw(_NODES)}
    return {**root, "$defs": named, "definitions": {"3": draw(_LEAVES)}}
