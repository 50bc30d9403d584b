"""Text of bodies that is no Unicode."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.errors import InvalidArgument
from services.facade.work.jobs import check_unicode

TEXTS = st.text(st.characters(codec=None), max_size=4)
BODIES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=8,
)


def is_unicode(given: Any) -> bool:
    if isinstance(given, dict):
        return all(is_unicode(name) and is_unicode(value) for name, value in given.items())
    if isinstance(given, list):
        return all(map(is_unicode, given))
    return not isinstance(given, str) or given.encode(errors="replace").decode() == given


@given(BODIES)
def test_a_body_is_refused_if_a_text_of_it_is_no_unicode(body: Any) -> None:
    sent = json.dumps(body).encode()
    if is_unicode(json.loads(sent)):
        check_unicode(sent)
    else:
        with pytest.raises(InvalidArgument, match="half a character"):
            check_unicode(sent)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (rb'{"prompt": "a\ud83d"}', "prompt"),
        (rb'{"prompt": ["a", "\uDC00"]}', "prompt[1]"),
        (
            rb'{"messages": [{"role": "u", "content": [{"text": "\ud83d\ud83d"}]}]}',
            "messages[0].content[0].text",
        ),
        (rb'{"a": {"b\ud800": 1}}', "a.b\ufffd"),
        (rb'"\ud800"', ""),
        (b"[" * 900 + rb'"\ud800"' + b"]" * 900, "[0]" * 900),
        (b'{"prompt": "\xed\xa0\xbd"}', ""),
        ("\ufeff{}".encode("utf-16"), ""),
    ],
)
def test_the_field_is_named(body: bytes, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_unicode(body)
    assert [violation.field for violation in refused.value.violations] == [field]


def test_what_is_no_json_is_left_to_those_who_read_it() -> None:
    for body in (b"", rb'{"a": "\ud800', b"[" * 100_000 + rb'"\ud800"', rb'"\ud83d\ude00"'):
        check_unicode(body)
