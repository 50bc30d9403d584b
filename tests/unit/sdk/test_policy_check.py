"""The comparison of the fleet's log-probabilities with the trainer's: rounding, and another policy."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import (
    FinishReason,
    LogprobsMode,
    PolicyGap,
    PolicyMismatchError,
    Provenance,
    Sample,
    SampleRequest,
    SampleStatus,
    TokenDelta,
    check_policy,
)
from paceline.policy_check import TOLERANCE, policy_gap

LOGPROBS = st.lists(st.floats(-12, 0), min_size=1, max_size=64)


@given(LOGPROBS, st.floats(0.2, 3))
def test_a_policy_agrees_with_itself_and_not_with_one_that_is_off_everywhere(
    own: list[float], off: float
) -> None:
    assert policy_gap(own, own) == PolicyGap(0, 0, 0, math.ceil(len(own) / 4))
    other = policy_gap(own, [each - off for each in own])
    assert (other.median, other.largest) == pytest.approx((off, off))


@given(st.lists(st.floats(-12, -1), min_size=16, max_size=64), st.integers(0, 15), st.floats(-50, 0))
def test_one_token_does_not_make_another_policy(own: list[float], place: int, value: float) -> None:
    other = [each + 0.01 for each in own]
    other[place] = value
    assert policy_gap(own, other).median <= TOLERANCE


@pytest.mark.parametrize("sure", ["fleet", "trainer"])
def test_tokens_that_both_are_sure_of_do_not_hide_the_others(sure: str) -> None:
    """A policy of few choices: three of four tokens are certain, under any weights."""
    one, other = np.zeros(128), np.zeros(128)
    other[::4] = -0.5
    gap = policy_gap(one, other) if sure == "fleet" else policy_gap(other, one)
    assert (gap.median, gap.tokens) == (0.5, 32)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_another_policy(value: float) -> None:
    for pair in (([value] * 4, [-1.0] * 4), ([-1.0] * 4, [value] * 4)):
        assert policy_gap(*pair).median == math.inf


@pytest.mark.parametrize(("fleet", "trainer"), [([], []), ([-1.0], [-1.0, -1.0]), ([[-1.0]], [[-1.0]])])
def test_other_numbers_of_tokens_cannot_be_compared(fleet: Any, trainer: Any) -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        policy_gap(fleet, trainer)


class FakeRun:
    """A run whose samples have lengths and a status; log-probabilities are functions of token and place."""

    def __init__(self, lengths: tuple[int, ...], status: SampleStatus = SampleStatus.TRUNCATED) -> None:
        self.lengths, self.status = lengths, status
        self.asked: list[SampleRequest] = []
        self.client = self

    def deployments(self) -> list[Any]:
        return [self]

    def generate(self, request: SampleRequest) -> Iterator[TokenDelta | Sample]:
        self.asked.append(request)
        tokens = np.arange(request.slot, request.slot + self.lengths[request.slot])
        logprobs = told(tokens).astype(np.float32)
        yield TokenDelta(tokens, logprobs)
        yield Sample(
            prompt_id=request.prompt_id,
            slot=request.slot,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=FinishReason.LENGTH,
            status=self.status,
            version_spans=(),
            provenance=Provenance(),
            seed=0,
        )


def told(tokens: Any) -> Any:
    return -1 - np.asarray(tokens) / 16 - np.arange(len(tokens)) / 32


def test_a_check_compares_a_few_short_samples_of_the_models_own_distribution() -> None:
    run = FakeRun((32, 32, 31, 32))
    seen = []

    def own(prompt: Any, responses: Any) -> Any:
        seen.append((prompt, [len(each) for each in responses]))
        return [told(each) for each in responses]

    gap = check_policy(run, np.array([5, 6]), own)  # type: ignore[arg-type]
    assert gap is not None
    assert gap.median < 1e-6
    assert gap.tokens == 31
    assert seen == [([5, 6], [31] * 4)]
    assert [each.slot for each in run.asked] == [0, 1, 2, 3]
    asked = run.asked[0]
    # It is no part of the run: neither of its steps nor of its drafts.
    assert (asked.run_id, asked.prompt_id, asked.sampling.max_tokens) == ("", "", 32)
    assert asked.sampling.logprobs_mode is LogprobsMode.RAW
    assert asked.sampling.ignore_eos


def test_a_gap_is_an_error_that_says_how_large_it_is_and_what_to_do() -> None:
    run = FakeRun((32,) * 4)

    def off(prompt: Any, responses: Any) -> Any:
        return [told(each) + 0.06 for each in responses]

    with pytest.raises(
        PolicyMismatchError, match=r"differ by 0\.060 .*allowed is 0\.05.*adapters, tied"
    ) as raised:
        check_policy(run, [1], off)  # type: ignore[arg-type]
    again = pickle.loads(pickle.dumps(raised.value))
    assert (str(again), again.gap, again.tolerance) == (str(raised.value), raised.value.gap, 0.05)
    assert check_policy(run, [1], off, tolerance=0.07) == raised.value.gap  # type: ignore[arg-type]


def test_samples_that_failed_are_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    run = FakeRun((32,) * 4, SampleStatus.FAILED)
    with caplog.at_level(logging.WARNING, "paceline"):
        assert check_policy(run, [1], lambda prompt, responses: []) is None  # type: ignore[arg-type]
    assert "the policy is not checked: its samples ended as" in caplog.text
