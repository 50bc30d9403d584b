"""What a grammar lets a model write fits the schema: every allowed keyword, sampled and validated."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from jsonschema import Draft202012Validator

from services.contracts.schemas import schema_faults
from services.generation.engine.grammars import Grammars, masks_for
from tests.support.json_walks import STOP, TOKENS, finished_text, schemas, vocabulary
from tests.support.soak import Progress, record

TEXTS = 4
"""Texts of each schema."""


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(vocabulary())


def validated(grammars: Grammars, schema: dict[str, Any]) -> int:
    """Return how many texts of a schema were written; each fits it. 0 if it is refused."""
    text = json.dumps(schema)
    if schema_faults(text):
        return 0
    assert grammars.check(text, [], [STOP]) == ""
    validator, rng, found = Draft202012Validator(schema), random.Random(0), 0
    for _ in range(TEXTS):
        written = finished_text(grammars, text, rng)
        if written is not None:
            validator.validate(json.loads(written))
            found += 1
    return found


@pytest.mark.parametrize(
    "count",
    [200, pytest.param(20_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])],
    ids=["short", "soak"],
)
def test_every_text_fits_its_schema(grammars: Grammars, count: int) -> None:
    found, progress = list[int](), Progress("json schemas", count, "schema")

    @settings(max_examples=count)
    @given(schemas())
    def check(schema: dict[str, Any]) -> None:
        found.append(validated(grammars, schema))
        if len(found) % 1000 == 0:
            progress.tell(len(found), f"{sum(found)} texts")

    check()
    assert sum(found) > len(found)
    if count > 1000:
        record(
            "json_schemas", {"schemas": len(found), "followed": sum(map(bool, found)), "texts": sum(found)}
        )


@pytest.mark.parametrize(
    "schema", [{"type": "string", "minLength": 3}, {"type": "string", "pattern": "^[^a]{3}$"}]
)
def test_strings_have_no_control_characters_as_they_are(grammars: Grammars, schema: dict[str, Any]) -> None:
    state, masks = grammars.begin(json.dumps(schema), [STOP]), masks_for(1, STOP + 1)
    state.fill([TOKENS.index(b'"')], [], masks, 0)
    bits = masks[0].numpy().view("uint32")
    allowed = {TOKENS[token] for token in range(STOP) if bits[token // 32] >> (token % 32) & 1}
    assert allowed.isdisjoint({b"\t", b"\x00", b"\x1f", b"a\t", b"\n", b"\r"})
    assert {b"b", b" "} <= allowed


@pytest.mark.parametrize(
    "schema", ['{"type": "boolean"}', '{"const": "a"}', '{"type": "object", "properties": {}}']
)
def test_a_schema_that_no_token_can_begin_is_refused_when_it_is_checked(schema: str) -> None:
    digits = Grammars(vocabulary([bytes([each]) for each in b"0123456789"]))
    assert digits.check(schema, [], [10]) == "allows no token of the model's vocabulary at first"
    assert digits.check('{"type": "integer"}', [], [10]) == ""
    assert digits.check('{"type": "integer"}', [4], [10]) == ""
    assert "prefix" in digits.check('{"type": "integer", "maximum": 9}', [4, 2], [10])


def test_a_schema_that_cannot_go_on_is_known_by_its_response() -> None:
    tokens = [b'"', b"a", b"b"]
    some = Grammars(vocabulary(tokens))
    schema = '{"const": "abc"}'
    assert some.check(schema, [], [3]) == ""
    assert not some.allows_nothing(schema, [0, 1], [3])
    assert some.allows_nothing(schema, [0, 1, 2], [3])
    assert "behind the prefix" in some.check(schema, [0, 1, 2], [3])


def test_the_engine_checks_the_keywords_too(grammars: Grammars) -> None:
    assert "multipleOf" in grammars.check('{"type": "integer", "multipleOf": 3}', [], [STOP])
    # What xgrammar does not take, of what is allowed.
    large = json.dumps({"type": "string", "pattern": "^(a|b){500}$"})
    assert grammars.check(large, [], [STOP]).startswith("is not a schema that can be served: Check failed")
