"""Checks of exactness levels and of reports on a batch."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from paceline.columns import TokenBuffer
from paceline.transport.channel import MAX_MESSAGE_BYTES
from paceline.v1 import rollout_pb2, sample_pb2
from services.contracts.sampling import ModelLimits
from services.gateway.api.validation import check_exactness, check_generate, check_report, check_submit
from services.gateway.state.lenience import CEILING

LENIENT = sample_pb2.EXACTNESS_LEVEL_LENIENT
LIMITS = ModelLimits(vocab_size=100, max_model_len=64)
OTHERS = [level for level in sample_pb2.ExactnessLevel.values() if level != LENIENT]


def fields(exactness: sample_pb2.Exactness) -> list[str]:
    return [violation.field for violation in check_exactness(exactness)]


@pytest.mark.parametrize(
    "wanted",
    [
        {"lenience": 1.0},
        {"lenience": math.exp(0.5), "reuse_delay": 1},
        {"lenience": 1e9},
        {"kl_target": 1e-4},
        {"kl_target": 0.1, "lenience": CEILING, "diversity_floor": 1.0},
        {"lenience": 1.5, "diversity_floor": 0.01},
    ],
)
def test_lenient_is_taken_with_what_belongs_to_it(wanted: dict[str, Any]) -> None:
    assert check_exactness(sample_pb2.Exactness(level=LENIENT, **wanted)) == []


@pytest.mark.parametrize(
    ("wanted", "at_fault"),
    [
        ({}, ["lenience"]),
        ({"lenience": 0.99}, ["lenience"]),
        ({"lenience": math.inf}, ["lenience"]),
        ({"lenience": math.nan}, ["lenience"]),
        ({"lenience": CEILING * 1.01, "kl_target": 0.1}, ["lenience"]),
        ({"kl_target": 0.0}, ["kl_target"]),
        ({"kl_target": -1.0}, ["kl_target"]),
        ({"kl_target": math.nan}, ["kl_target"]),
        ({"kl_target": math.inf}, ["kl_target"]),
        ({"lenience": 1.0, "diversity_floor": 0.0}, ["diversity_floor"]),
        ({"lenience": 1.0, "diversity_floor": 1.01}, ["diversity_floor"]),
        ({"lenience": 1.0, "diversity_floor": math.nan}, ["diversity_floor"]),
        ({"lenience": 0.0, "kl_target": 0.0, "diversity_floor": 2.0}, ["lenience", "kl_target", "diversity_floor"]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_lenient_is_named(wanted: dict[str, Any], at_fault: list[str]) -> None:
    assert fields(sample_pb2.Exactness(level=LENIENT, **wanted)) == [f"exactness.{each}" for each in at_fault]


@pytest.mark.parametrize("level", OTHERS)
def test_no_other_level_has_fields_of_lenient(level: sample_pb2.ExactnessLevel) -> None:
    assert check_exactness(sample_pb2.Exactness(level=level)) == []
    mixed = sample_pb2.Exactness(level=level, lenience=1.5, kl_target=0.1, diversity_floor=0.5, reuse_delay=1)
    names = ("lenience", "kl_target", "diversity_floor", "reuse_delay")
    assert fields(mixed) == [f"exactness.{name}" for name in names]


def test_an_unknown_level_is_told_which_there_are() -> None:
    (violation,) = check_exactness(sample_pb2.Exactness(level=77))  # type: ignore[arg-type]
    assert violation.field == "exactness.level"
    assert "77" in violation.description
    assert "LENIENT" in violation.description


@pytest.mark.parametrize(
    ("names", "at_fault"),
    [
        ({}, ["run_id", "prompt_id"]),
        ({"run_id": "run"}, ["prompt_id"]),
        ({"run_id": "a b", "prompt_id": "p"}, ["run_id"]),
        ({"run_id": "run", "prompt_id": "p" * 257}, ["prompt_id"]),
        ({"run_id": "run", "prompt_id": "p"}, []),
    ],
)
def test_one_lenient_sample_needs_the_names_of_what_is_cached(
    names: dict[str, str], at_fault: list[str]
) -> None:
    lenient = sample_pb2.Exactness(level=LENIENT, lenience=1.5)
    request = rollout_pb2.GenerateRequest(prompt_token_ids=[1], exactness=lenient, **names)
    assert [violation.field for violation in check_generate(request, LIMITS)] == at_fault


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [
        ({}, []),
        ({"run_id": "run", "prompt_id": "p"}, []),
        ({"run_id": "a b", "prompt_id": "p" * 257}, ["run_id", "prompt_id"]),
        ({"prefix_token_ids": [1, 2], "prefix_logprobs": [-1.0, -2.0]}, []),
        ({"prefix_token_ids": [1, 2], "prefix_logprobs": [-1.0]}, ["prefix_logprobs"]),
        ({"prefix_logprobs": [-1.0]}, ["prefix_logprobs"]),
    ],
)
def test_one_exact_sample_needs_no_names(fields: dict[str, Any], at_fault: list[str]) -> None:
    request = rollout_pb2.GenerateRequest(prompt_token_ids=[1], **fields)
    assert [violation.field for violation in check_generate(request, LIMITS)] == at_fault


def report(**wanted: Any) -> list[str]:
    request = rollout_pb2.ReportRewardsRequest(run_id="run", batch_id="b", **wanted)
    return [violation.field for violation in check_report(request)]


def test_a_report_is_on_a_batch_or_on_a_step() -> None:
    assert report(step=0) == ["batch_id"]
    for run_id, at_fault in (("run", []), ("", ["run_id"])):
        request = rollout_pb2.ReportRewardsRequest(run_id=run_id, step=0)
        assert [violation.field for violation in check_report(request)] == at_fault


def test_a_report_needs_numbers_in_their_ranges() -> None:
    assert report(kl=0.0, clip_fraction=1.0) == []
    assert report() == []
    for kl in (-1e-9, math.nan, math.inf):
        assert report(kl=kl) == ["kl"]
    for clipped in (-0.1, 1.1, math.nan):
        assert report(clip_fraction=clipped) == ["clip_fraction"]


def test_a_report_names_every_sample_once_with_a_finite_reward() -> None:
    rewards = [
        rollout_pb2.Reward(prompt_id="p", slot=0, reward=-1.0),
        rollout_pb2.Reward(prompt_id="p", slot=1, reward=math.nan),
        rollout_pb2.Reward(prompt_id="q", slot=0, reward=math.inf),
        rollout_pb2.Reward(prompt_id="p", slot=0, reward=-1.0),
    ]
    assert report(rewards=rewards) == ["rewards[1].reward", "rewards[2].reward", "rewards[3]"]


LONG = ModelLimits(vocab_size=150_000, max_model_len=131_072)


def refused(prompt: int = 1, **sampling: int) -> list[tuple[str, str]]:
    """Return the violations of two groups and of a single sample, which are the same."""
    params = sample_pb2.SamplingParams(**sampling)
    groups = [
        rollout_pb2.Group(prompt_id=name, prompt_token_ids=[1] * prompt, samples=1) for name in ("a", "b")
    ]
    batch = rollout_pb2.SubmitRolloutsRequest(
        run_id="r", batch_id="b", sampling=params, exactness=sample_pb2.Exactness(), groups=groups
    )
    single = rollout_pb2.GenerateRequest(prompt_token_ids=[1] * prompt, sampling=params)
    found = check_submit(batch, LONG)
    assert found == check_generate(single, LONG)
    return [(each.field, each.description) for each in found]


def test_a_sample_that_may_be_larger_than_a_message_is_refused_with_a_way_out() -> None:
    ((field, fault),) = refused(top_logprobs=20)
    assert field == "sampling.top_logprobs"
    assert fault.startswith(
        "is 20: a sample of 131071 tokens could have 19267437 bytes, and a message has room "
    )
    (fitting,) = re.findall(r"set max_tokens to at most (\d+)", fault)
    assert refused(top_logprobs=20, max_tokens=int(fitting)) == []
    assert len(refused(top_logprobs=20, max_tokens=int(fitting) + 1)) == 1
    assert refused(top_logprobs=16) == []
    # What is promised to fit does, with all its other fields.
    tokens = TokenBuffer()
    tokens.extend(TokenBuffer.given([149_999] * int(fitting), 20))
    assert sample_pb2.Sample(tokens=tokens.message()).ByteSize() <= MAX_MESSAGE_BYTES * 63 // 64


def test_log_probabilities_of_a_prompt_count() -> None:
    both = {"top_logprobs": 20, "prompt_logprobs": 20, "max_tokens": 60_000}
    assert [field for field, _ in refused(60_000, **both)] == ["sampling.top_logprobs"]
    assert refused(60_000, **both | {"max_tokens": 40_000}) == []
    ((field, fault),) = refused(120_000, prompt_logprobs=20, max_tokens=8)
    assert field == "sampling.prompt_logprobs"
    assert "request fewer, or shorten the prompt" in fault
