"""vLLM's endpoints for tokens, in the sequences of prime-rl and SkyRL."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from services.contracts.seeds import sample_seed
from services.facade.dialects.body import prompt_id_of
from tests.integration.facade.conftest import StackMaker, expected
from tests.integration.gateway.conftest import until
from tests.support.fake_instance import token_at

PROMPT = [1, 2, 3]
SEED = 7
HELD = 5


def prime_body(request_id: str, **sampling: Any) -> dict[str, Any]:
    """Return the body of prime-rl's rollout, which its renderer makes."""
    params = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "max_tokens": 12,
        "min_tokens": 0,
        "logprobs": 1,
        "seed": SEED,
        "stop_token_ids": [0],
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "repetition_penalty": 1.0,
        "ignore_eos": True,
        **sampling,
    }
    return {
        "request_id": request_id,
        "model": "fake",
        "token_ids": PROMPT,
        "sampling_params": params,
        "cache_salt": "4",
        "priority": 0,
    }


async def test_prime_rls_rollouts_stay_in_flight_through_its_update(
    stack_of: StackMaker, tmp_path: Path
) -> None:
    stack = await stack_of()
    stack.fakes[0].hold_at = HELD
    body = prime_body("r-1", stop_token_ids=[], n=2)
    asking = asyncio.create_task(stack.facade.post("/inference/v1/generate", **body))
    await until(lambda: len(stack.fakes[0].running()) == 2, "the samples run")
    http = stack.facade.http
    (await http.post("/pause", params={"mode": "keep", "clear_cache": "false"})).raise_for_status()
    await until(
        lambda: all(len(o.token_ids) == HELD for group in stack.facade.work() for o in group.outputs),
        "the samples have grown",
    )
    await stack.facade.post("/update_weights", weight_dir=str(tmp_path))
    (await http.post("/resume")).raise_for_status()
    stack.fakes[0].hold_at = None
    answer = await asking
    assert (answer["request_id"], answer["output_mode"]) == ("r-1", "tokens")
    for slot, choice in enumerate(answer["choices"]):
        seed = sample_seed(SEED, 0, prompt_id_of(PROMPT), slot)
        want = [token_at(seed, place, 0 if place < HELD else 1) for place in range(12)]
        content = choice["logprobs"]["content"]
        assert choice["token_ids"] == [entry["token_id"] for entry in content] == [token for token, _ in want]
        assert [entry["logprob"] for entry in content] == [value for _, value in want]
        assert [entry["token"] for entry in content] == [f"token_id:{token}" for token, _ in want]
        assert choice["finish_reason"] == "length"
        assert choice["weight_versions"] == [
            {"version": "0", "start": 0, "end": HELD},
            {"version": "1", "start": HELD, "end": 12},
        ]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 24, "total_tokens": 27}


async def test_skyrls_generate_and_detokenize(stack_of: StackMaker, tokenizer_folder: Path) -> None:
    stack = await stack_of(model=tokenizer_folder, served_model_name="policy")
    http = stack.facade.http
    size = await http.request("GET", "/get_world_size", json={})
    assert size.json() == {"world_size": 1}
    params = {
        "max_tokens": 9,
        "min_tokens": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "logprobs": 0,
        "skip_special_tokens": True,
        "include_stop_str_in_output": True,
        "seed": SEED,
        "ignore_eos": True,
    }
    body = {"sampling_params": params, "model": "policy", "token_ids": PROMPT}
    answer = await http.post("/inference/v1/generate", json=body, headers={"X-Session-ID": "s-1"})
    (choice,) = answer.raise_for_status().json()["choices"]
    tokens, logprobs = expected(PROMPT, 0, SEED, 9, ignore_eos=True)
    assert choice["token_ids"] == tokens
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == logprobs
    text = (await stack.facade.post("/detokenize", model="policy", tokens=tokens))["prompt"]
    assert text == " ".join(f"w{token}" for token in tokens)
    back = await stack.facade.post("/tokenize", model="policy", prompt=text, add_special_tokens=False)
    assert (back["tokens"], back["count"]) == (tokens, 9)
    finished = await http.post("/finish_session", params={"session_id": "s-1"})
    assert (finished.status_code, finished.json()) == (200, {"status": "ok"})


async def test_an_aborted_request_has_its_partial_and_goes_on_from_it(stack_of: StackMaker) -> None:
    stack = await stack_of()
    stack.fakes[0].hold_at = HELD
    body = prime_body("r-7", stop_token_ids=[])
    asking = asyncio.create_task(stack.facade.post("/inference/v1/generate", **body))
    await until(
        lambda: any(len(o.token_ids) == HELD for group in stack.facade.work() for o in group.outputs),
        "the sample has grown",
    )
    assert await stack.facade.post("/inference/v1/abort_requests", request_ids=["r-8"]) == {
        "aborted_samples": 0
    }
    await stack.facade.post("/inference/v1/abort_requests", request_ids=["r-7"])
    (choice,) = (await asking)["choices"]
    assert choice["finish_reason"] == "abort"
    assert choice["token_ids"] == expected(PROMPT, 0, SEED, HELD, ignore_eos=True)[0]


async def test_a_stream_of_tokens(stack_of: StackMaker) -> None:
    stack = await stack_of()
    body = prime_body("r-2", stop_token_ids=[], max_tokens=30)
    more = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    async with stack.facade.http.stream("POST", "/inference/v1/generate", json=body | more) as stream:
        lines = [line async for line in stream.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line[6:]) for line in lines[:-1]]
    choices = [choice for event in events for choice in event["choices"]]
    want, _ = expected(PROMPT, 0, SEED, 30, ignore_eos=True)
    assert [token for choice in choices for token in choice["token_ids"]] == want
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert len(choices) > 2
    assert [event.get("prompt_token_ids") for event in events[:2]] == [PROMPT, None]
    assert events[-1]["usage"]["completion_tokens"] == 30


BAD: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": []}, "token_ids"),
    ({"token_ids": [-1]}, "token_ids"),
    ({"features": {"mm_hashes": {}}}, "features"),
    ({"output_mode": "text"}, "output_mode"),
    ({"sampling_params": {"logprobs": 5}}, "sampling_params.logprobs"),
    ({"sampling_params": {"seed": 1 << 64}}, "sampling_params.seed"),
    ({"sampling_params": {"n": 0}}, "sampling_params.n"),
    ({"sampling_params": {"logit_bias": {"1": 2.0}}}, "sampling_params.logit_bias"),
    ({"sampling_params": {"extra_args": {"prl_compact_logprobs": True}}}, "sampling_params.extra_args"),
    ({"sampling_params": {"stream": True}}, "sampling_params.stream"),
]


async def test_a_bad_parameter_is_named(stack_of: StackMaker) -> None:
    stack = await stack_of()
    for changes, param in BAD:
        body = {"token_ids": [1], "sampling_params": {}, **changes}
        response = await stack.facade.http.post("/inference/v1/generate", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), changes
    for path, body in (("/tokenize", {"prompt": "w1"}), ("/detokenize", {"tokens": [1]})):
        response = await stack.facade.http.post(path, json=body)
        assert "no tokenizer" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/sleep", "/init_broadcaster"])
async def test_what_there_is_not_says_so(stack_of: StackMaker, path: str) -> None:
    stack = await stack_of()
    assert (await stack.facade.http.post(path, json={})).status_code == 501


async def test_of_several_facades_none_is_paused_or_aborted_alone(stack_of: StackMaker) -> None:
    stack = await stack_of(alone=False)
    for path in ("/pause", "/pause_generation", "/abort_request", "/inference/v1/abort_requests"):
        response = await stack.facade.http.post(path, json={"abort_all": True, "request_ids": []})
        assert response.status_code == 501
        assert "one of several" in response.json()["error"]["message"]
    assert (await stack.facade.http.get("/v1/loads")).status_code == 501
    assert await stack.facade.post("/v1/completions", prompt=[1], max_tokens=1)
