"""A wrong state is told from rounding."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from services.generation.engine.startup import TOLERANCES, Decoded, disagreement

SAMPLES, TOKENS, LIKELIEST = 4, 12, 20


def responses(seed: int = 0) -> list[Decoded]:
    """Responses with distributions of which the likeliest tokens are the same ones at all positions."""
    random = Random(seed)
    return [
        Decoded(
            [random.randrange(LIKELIEST) for _ in range(TOKENS)],
            [{token: -random.uniform(1, 8) for token in range(LIKELIEST)} for _ in range(TOKENS)],
        )
        for _ in range(SAMPLES)
    ]


def changed(found: list[Decoded], shift: Callable[[int, int], float]) -> list[Decoded]:
    """The same with each log-probability moved by a normal deviate times `shift(sample, position)`."""
    random = Random(9)
    return [
        Decoded(
            list(each.tokens),
            [
                {token: value + random.gauss(0, 1) * shift(place, i) for token, value in row.items()}
                for i, row in enumerate(each.likeliest)
            ],
        )
        for place, each in enumerate(found)
    ]


@pytest.mark.parametrize(
    ("dtype", "rounding"), [("float32", 2e-5), ("float16", 0.01), ("bfloat16", 0.08), ("unknown", 0.08)]
)
def test_rounding_is_no_disagreement_and_half_a_nat_is(dtype: str, rounding: float) -> None:
    plain = responses()
    assert disagreement(plain, plain, dtype) == ""
    assert disagreement(plain, changed(plain, lambda place, i: rounding), dtype) == ""
    assert "nats off" in disagreement(plain, changed(plain, lambda place, i: 0.75), dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_one_wrong_sample_in_a_batch_is_found(dtype: str) -> None:
    plain = responses()
    assert disagreement(plain, changed(plain, lambda place, i: 0.8 * (place == 2)), dtype)


def test_an_expert_chosen_otherwise_at_single_positions_is_rounding() -> None:
    plain = responses()
    flipped = changed(plain, lambda place, i: 0.6 if i % 4 == 3 else 0.03)
    assert disagreement(plain, flipped, "bfloat16") == ""


def test_a_near_tie_ends_the_comparison_of_its_sample_and_no_more() -> None:
    plain = responses()
    other = changed(plain, lambda place, i: 0.03)
    for each in other:
        each.tokens[1] += 1
        # Behind another token everything differs.
        each.likeliest[2:] = responses(5)[0].likeliest[2:]
    assert disagreement(plain, other, "bfloat16") == ""


def test_a_wrong_state_that_changes_every_first_token_is_found() -> None:
    plain = responses()
    other = changed(plain, lambda place, i: 0.9 if i else 0.0)
    for each in other:
        each.tokens[1] += 1
    assert "nats off" in disagreement(plain, other, "bfloat16")


def test_other_likeliest_tokens_are_a_disagreement() -> None:
    plain = responses()
    other = [
        Decoded(each.tokens, [{token + 15: value for token, value in row.items()} for row in each.likeliest])
        for each in plain
    ]
    assert "other tokens" in disagreement(plain, other, "bfloat16")


def test_nothing_to_compare_is_no_agreement() -> None:
    assert disagreement([Decoded([1], [{1: -1.0}])], [Decoded([1], [{1: -1.0}])], "float32")
