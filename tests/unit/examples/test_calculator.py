"""The calculator of the example: it answers what stands before the `=`, and only that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.tinymath.calculator import calculate
from examples.tinymath.tokenizer import encode


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("248-154=", "94"),
        ("95+57:5+7=", "12"),
        ("5+7=12,9+5+1=", "15"),
        ("67*47:7*7=49,6*7+4=", "46"),
        ("3-8=", "-5"),
        ("=", "?"),
        ("5+=", "?"),
        ("5+7", "?"),
    ],
)
def test_what_stands_before_the_call_is_calculated(text: str, result: str) -> None:
    assert calculate(text) == result
    assert encode(result), "the policy can read it"


@given(st.lists(st.tuples(st.sampled_from("+-*"), st.integers(0, 9999)), min_size=1, max_size=6))
def test_expressions_have_their_usual_meaning(parts: list[tuple[str, int]]) -> None:
    expression = "7" + "".join(f"{sign}{number}" for sign, number in parts)
    assert calculate(f"x:{expression}=") == str(eval(expression))
