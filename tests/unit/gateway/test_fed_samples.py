"""Entries of the learner's feed: which samples they are of, and whose noise they tell."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.v1 import rollout_pb2, sample_pb2
from services.gateway.feeds.learner import sample_of
from services.gateway.state.messages import BatchBuilder
from services.gateway.state.sample import SampleEnding
from tests.support.token_columns import buffer

BUILDER = BatchBuilder(max_seconds=1.0, max_attempts=1)
ENDING = SampleEnding(0, sample_pb2.FINISH_REASON_STOP, sample_pb2.SAMPLE_STATUS_COMPLETED, 1.0)


def fed(sampling: dict[str, Any], **fields: Any) -> Any:
    request = rollout_pb2.GenerateRequest(run_id="run", prompt_id="p", step=3, prompt_token_ids=[1], **fields)
    request.sampling.CopyFrom(sample_pb2.SamplingParams(**sampling))
    batch = BUILDER.from_generate(request, ("run", "g"), 7, accepted_at=0.0)
    batch.samples[0].columns = buffer([4, 5], [-1.0, -1.0], version=7)
    return sample_of(batch, ENDING), batch.samples[0].seed


def test_a_single_sample_is_fed_under_its_step() -> None:
    sample, seed = fed({"max_tokens": 9})
    assert (sample.batch, sample.prompt_id, sample.policy_version) == (("run", "generate/3"), "p", 7)
    assert (sample.prompt, sample.response, sample.seed) == ((1,), (4, 5), seed)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.5},
        {"top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.1},
        {"min_tokens": 1},
        {"presence_penalty": 0.1},
        {"allowed_token_ids": [4, 5]},
        {"json_schema": "{}"},
    ],
)
def test_noise_is_told_only_of_what_was_sampled_from_the_whole_distribution(sampling: dict[str, Any]) -> None:
    sample, _ = fed(sampling)
    assert sample.seed is None


def test_what_a_caller_began_is_not_fed() -> None:
    assert fed({}, prefix_token_ids=[4], prefix_logprobs=[-1.0])[0] is None
