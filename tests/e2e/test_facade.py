"""The facade in front of real engines: the tokens over HTTP are those over gRPC under the same seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from paceline import Client, Sample, SampleRequest, SamplingParams
from services.facade.dialects.body import prompt_id_of
from services.local import Platform
from tests.e2e.conftest import http_client

PROMPTS = [[3, 4, 5], [6, 7]]
SEED = 11


@pytest.fixture
def http(platform: Platform) -> Iterator[httpx.Client]:
    with http_client(platform) as client:
        yield client


def over_grpc(client: Client, prompt: list[int], slot: int) -> Sample:
    """Return a sample as the native client gets it."""
    request = SampleRequest(
        "http",
        prompt_id_of(prompt),
        prompt,
        slot=slot,
        step=client.versions().policy_version,
        sampling=SamplingParams(max_tokens=24),
        run_seed=SEED,
    )
    *_, sample = client.generate(request)
    assert isinstance(sample, Sample)
    return sample


def test_tokens_over_http_are_those_over_grpc(http: httpx.Client, client: Client) -> None:
    body = {
        "prompt": PROMPTS,
        "n": 2,
        "seed": SEED,
        "max_tokens": 24,
        "logprobs": 0,
        "return_token_ids": True,
    }
    choices = http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
    samples = [over_grpc(client, prompt, slot) for prompt in PROMPTS for slot in (0, 1)]
    assert [choice["token_ids"] for choice in choices] == [sample.token_ids.tolist() for sample in samples]
    for choice, sample in zip(choices, samples, strict=True):
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(sample.logprobs.tolist(), abs=1e-4)


def test_tokens_in_sglangs_dialect_are_the_same(http: httpx.Client, client: Client) -> None:
    params = {"max_new_tokens": 24, "sampling_seed": SEED, "n": 2}
    body = {"input_ids": PROMPTS, "sampling_params": params, "return_logprob": True}
    answers = http.post("/generate", json=body).raise_for_status().json()
    samples = [over_grpc(client, prompt, slot) for prompt in PROMPTS for slot in (0, 1)]
    assert [answer["output_ids"] for answer in answers] == [sample.token_ids.tolist() for sample in samples]
    for answer, sample in zip(answers, samples, strict=True):
        # At temperature 1 and without masks the processed log-probabilities are the raw ones.
        values = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        assert values == pytest.approx(sample.logprobs.tolist(), abs=1e-4)


def test_tokens_of_vllms_endpoint_for_tokens_are_the_same(http: httpx.Client, client: Client) -> None:
    for prompt in PROMPTS:
        params = {"max_tokens": 24, "seed": SEED, "n": 2, "logprobs": 1}
        body = {"token_ids": prompt, "sampling_params": params}
        choices = http.post("/inference/v1/generate", json=body).raise_for_status().json()["choices"]
        samples = [over_grpc(client, prompt, slot) for slot in (0, 1)]
        assert [choice["token_ids"] for choice in choices] == [each.token_ids.tolist() for each in samples]
        for choice, sample in zip(choices, samples, strict=True):
            values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            assert values == pytest.approx(sample.logprobs.tolist(), abs=1e-4)


def test_a_sample_goes_on_from_what_it_has_and_ends_where_it_had_ended(http: httpx.Client) -> None:
    params: dict[str, Any] = {"max_new_tokens": 24, "sampling_seed": SEED, "ignore_eos": True}
    body = {"input_ids": PROMPTS[0], "sampling_params": params}
    tokens = http.post("/generate", json=body).raise_for_status().json()["output_ids"]
    params = {**params, "stop_token_ids": [tokens[8]]}
    whole = tokens[: tokens.index(tokens[8]) + 1]
    for have in (len(whole) // 2, len(whole)):
        rest = {**body, "input_ids": PROMPTS[0] + whole[:have], "sampling_params": params}
        headers = {"X-Paceline-Slot": "0", "X-Paceline-Prefix": str(have)}
        answer = http.post("/generate", json=rest, headers=headers).raise_for_status().json()
        assert answer["output_ids"] == whole[have:]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": whole[-1]}
