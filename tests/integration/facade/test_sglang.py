"""SGLang's dialect against a gateway, in the sequences of slime, AReaL and prime-rl."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from services.contracts.seeds import sample_seed
from services.facade.dialects.body import prompt_id_of
from tests.integration.facade.conftest import Stack, StackMaker, expected
from tests.integration.gateway.conftest import until
from tests.support.fake_instance import token_at

PROMPT = [1, 2, 3]
SEED = 7
HELD = 5


def slime_body(prompt: list[int], **sampling: Any) -> dict[str, Any]:
    """Return the body of slime's rollout."""
    params = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 30,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        **sampling,
    }
    return {"sampling_params": params, "return_logprob": True, "input_ids": prompt}


def pairs_of(answer: dict[str, Any]) -> list[tuple[int, float]]:
    """Return tokens and log-probabilities as trainers read them."""
    return [(entry[1], entry[0]) for entry in answer["meta_info"]["output_token_logprobs"]]


async def begin(stack: Stack, body: dict[str, Any], samples: int = 1) -> asyncio.Task[dict[str, Any]]:
    """Begin a request whose samples stay at HELD tokens, and wait until the facade has those."""
    for fake in stack.fakes:
        fake.hold_at = HELD
    asking = asyncio.create_task(stack.facade.post("/generate", **body))
    await until(lambda: _grown(stack) == samples, "the samples have grown")
    return asking


def _grown(stack: Stack) -> int:
    groups = stack.facade.work()
    return sum(len(output.token_ids) == HELD for group in groups for output in group.outputs)


async def test_slimes_generate(stack_of: StackMaker) -> None:
    stack = await stack_of()
    assert (await stack.facade.http.get("/health_generate")).status_code == 200
    info = (await stack.facade.http.get("/get_server_info")).json()
    assert (info["tp_size"], info["pp_size"], info["enable_memory_saver"]) == (1, 1, False)
    answer = await stack.facade.post("/generate", **slime_body(PROMPT, sampling_seed=SEED))
    tokens, logprobs = expected(PROMPT, 0, SEED, 30)
    assert pairs_of(answer) == list(zip(tokens, logprobs, strict=True))
    assert answer["output_ids"] == tokens
    meta = answer["meta_info"]
    stopped = {"type": "stop", "matched": 0}
    assert meta["finish_reason"] == (stopped if tokens[-1] == 0 else {"type": "length", "length": 30})
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, len(tokens))
    assert meta["weight_version"] == "0"
    again = await stack.facade.post("/generate", **slime_body(PROMPT, sampling_seed=SEED))
    assert pairs_of(again) == pairs_of(answer)


async def test_several_prompts_and_samples_are_a_list(stack_of: StackMaker) -> None:
    stack = await stack_of()
    body = slime_body(PROMPT, sampling_seed=SEED, n=2)
    answers: Any = await stack.facade.post("/generate", **{**body, "input_ids": [PROMPT, [9]]})
    want = [expected(prompt, slot, SEED, 30)[0] for prompt in (PROMPT, [9]) for slot in (0, 1)]
    assert [answer["output_ids"] for answer in answers] == want


async def test_text_in_and_out(stack_of: StackMaker, tokenizer_folder: Path) -> None:
    stack = await stack_of(model=tokenizer_folder)
    tokens, _ = expected([3, 4], 0, SEED, 12, ignore_eos=True)
    params = {"sampling_seed": SEED, "max_new_tokens": 12, "ignore_eos": True, "skip_special_tokens": False}
    answer = await stack.facade.post(
        "/generate", text="w3 w4", sampling_params=params, return_logprob=True, return_text_in_logprobs=True
    )
    assert answer["text"] == " ".join(f"w{token}" for token in tokens)
    texts = [entry[2] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert texts == [f"w{token}" for token in tokens]


async def test_events_have_all_tokens_so_far(stack_of: StackMaker) -> None:
    stack = await stack_of()
    body = {**slime_body(PROMPT, sampling_seed=SEED, ignore_eos=True), "stream": True}
    found: list[dict[str, Any]] = []
    async with stack.facade.http.stream("POST", "/generate", json=body) as stream:
        lines = [line async for line in stream.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    found = [json.loads(line[6:]) for line in lines[:-1]]
    tokens, _ = expected(PROMPT, 0, SEED, 30, ignore_eos=True)
    assert len(found) > 2
    for event in found:
        assert event["output_ids"] == tokens[: len(event["output_ids"])]
        assert [token for token, _ in pairs_of(event)] == event["output_ids"]
    assert found[-1]["output_ids"] == tokens
    assert [event["meta_info"]["finish_reason"] for event in found[:-1]] == [None] * (len(found) - 1)


@pytest.mark.parametrize("body", [{"abort_all": True}, {"rid": "group-1"}])
async def test_an_aborted_request_is_answered_with_its_partial(
    stack_of: StackMaker, body: dict[str, Any]
) -> None:
    stack = await stack_of()
    asking = await begin(
        stack, {**slime_body(PROMPT, sampling_seed=SEED, ignore_eos=True), "rid": "group-1-a"}
    )
    loads = (await stack.facade.http.get("/v1/loads?include=core")).json()["loads"]
    assert [load["num_running_reqs"] for load in loads] == [1]
    assert (await stack.facade.http.get("/flush_cache")).status_code == 400
    assert (await stack.facade.post("/abort_request", **body))["aborted_samples"] == 1
    answer = await asking
    tokens, logprobs = expected(PROMPT, 0, SEED, HELD, ignore_eos=True)
    assert pairs_of(answer) == list(zip(tokens, logprobs, strict=True))
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["meta_info"]["weight_version"] == "0"
    loads = (await stack.facade.http.get("/v1/loads?include=core")).json()["loads"]
    assert [load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads] == [0]
    await until(lambda: not stack.fakes[0].running(), "the sample is gone")


async def test_slimes_update(stack_of: StackMaker, tmp_path: Path) -> None:
    """Pause, flush until idle, update from a folder, go on: the requests in between are of the new version."""
    stack = await stack_of(instances=2)
    asking = await begin(stack, slime_body(PROMPT, ignore_eos=True))
    http = stack.facade.http
    (await http.post("/pause_generation", json={})).raise_for_status()
    assert (await asking)["meta_info"]["finish_reason"]["type"] == "abort"
    for fake in stack.fakes:
        fake.hold_at = None
    waiting = asyncio.create_task(stack.facade.post("/generate", **slime_body(PROMPT, sampling_seed=SEED)))
    await until(lambda: stack.facade.metric("samples_in_flight") == 1, "the second request waits")
    assert (await http.get("/flush_cache")).status_code == 200
    update = {"model_path": str(tmp_path), "load_format": None, "flush_cache": True, "weight_version": "3"}
    answer = await stack.facade.post("/update_weights_from_disk", **update)
    assert answer["success"] is True
    assert answer["weight_version"] == "3"
    assert [fake.applied for fake in stack.fakes] == [[3], [3]]
    assert (await http.get("/get_weight_version")).json() == {"weight_version": "3"}
    assert not waiting.done()
    (await http.post("/continue_generation", json={})).raise_for_status()
    meta = (await waiting)["meta_info"]
    assert meta["weight_version"] == "3"
    seed = sample_seed(SEED, 0, prompt_id_of(PROMPT), 0)
    got = pairs_of(await waiting)
    assert got == [token_at(seed, place, 3) for place in range(len(got))]
    # A number that is not above the published version is a label: the next version comes.
    again = await stack.facade.post("/update_weights_from_disk", **{**update, "weight_version": "1"})
    assert again["weight_version"] == "4"


async def test_areals_update_and_resumed_requests(stack_of: StackMaker, tmp_path: Path) -> None:
    """Pause without a body, update with abort_all_requests, go on; the client resends prompt and partial."""
    stack = await stack_of()
    params = {
        "top_p": 1.0,
        "top_k": 100,
        "max_new_tokens": 20,
        "temperature": 1.0,
        "stop_token_ids": [],
        "frequency_penalty": 0.0,
        "ignore_eos": True,
    }
    body = {
        "input_ids": PROMPT,
        "image_data": [],
        "sampling_params": params,
        "return_logprob": True,
        "stream": False,
    }
    asking = await begin(stack, body)
    (await stack.facade.http.post("/pause_generation")).raise_for_status()
    partial = pairs_of(await asking)
    assert len(partial) == HELD
    stack.fakes[0].hold_at = None
    update = {"model_path": str(tmp_path), "abort_all_requests": True}
    assert (await stack.facade.post("/update_weights_from_disk", **update))["success"] is True
    (await stack.facade.http.post("/continue_generation")).raise_for_status()
    rest = {
        **body,
        "input_ids": PROMPT + [token for token, _ in partial],
        "sampling_params": {**params, "max_new_tokens": 20 - HELD},
    }
    answer = await stack.facade.post("/generate", **rest)
    assert len(pairs_of(answer)) == 20 - HELD
    assert answer["meta_info"]["weight_version"] == "1"


async def test_prime_rls_update_keeps_requests_in_flight(stack_of: StackMaker, tmp_path: Path) -> None:
    stack = await stack_of()
    stack.fakes[0].hold_at = HELD
    body = {"prompt": PROMPT, "seed": SEED, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    asking = asyncio.create_task(stack.facade.post("/v1/completions", **body))
    await until(lambda: _grown(stack) == 1, "the sample has grown")
    http = stack.facade.http
    (await http.post("/pause", params={"mode": "keep", "clear_cache": "false"})).raise_for_status()
    assert (await http.get("/is_paused")).json() == {"is_paused": True}
    await stack.facade.post("/update_weights", weight_dir=str(tmp_path))
    (await http.post("/resume")).raise_for_status()
    stack.fakes[0].hold_at = None
    (choice,) = (await asking)["choices"]
    assert choice["weight_versions"] == [
        {"version": "0", "start": 0, "end": HELD},
        {"version": "1", "start": HELD, "end": 12},
    ]
    seed = sample_seed(SEED, 0, prompt_id_of(PROMPT), 0)
    want = [token_at(seed, place, 0 if place < HELD else 1)[0] for place in range(12)]
    assert choice["token_ids"] == want


async def test_an_update_that_fails_is_aborted_and_says_why(stack_of: StackMaker, tmp_path: Path) -> None:
    stack = await stack_of(gateway={"weights_root": tmp_path / "weights"})
    for path in ("/elsewhere", "weights/relative"):
        response = await stack.facade.http.post("/update_weights_from_disk", json={"model_path": path})
        answer = response.json()
        assert response.status_code == 400
        assert answer["success"] is False
        assert answer["message"] == answer["error"]["message"]
    assert (await stack.facade.http.get("/get_weight_version")).json() == {"weight_version": "0"}
    (tmp_path / "weights").mkdir()
    # Nothing is left of the failed ones.
    inside = {"weight_dir": str(tmp_path / "weights")}
    assert (await stack.facade.post("/update_weights", **inside))["weight_version"] == 1
    assert stack.facade.metric("weight_updates_total", outcome="failed") == 2
    assert stack.facade.metric("weight_updates_total", outcome="published") == 1


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": PROMPT, "text": "both"}, "input_ids"),
    ({}, "input_ids"),
    ({"input_ids": []}, "input_ids"),
    ({"text": "words"}, "text"),
    ({"input_ids": PROMPT, "token_ids_logprob": [1]}, "token_ids_logprob"),
    ({"input_ids": PROMPT, "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
    ({"input_ids": PROMPT, "sampling_params": {"regex": "a+"}}, "sampling_params.regex"),
    ({"input_ids": PROMPT, "sampling_params": {"stop": ["x", ""]}}, "sampling_params.stop[1]"),
    ({"input_ids": PROMPT, "sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens"),
    ({"input_ids": PROMPT, "sampling_params": {"top_p": "x"}}, "sampling_params.top_p"),
    ({"input_ids": PROMPT, "sampling_params": {"top_k": -3}}, "sampling_params.top_k"),
    ({"input_ids": [-1]}, "input_ids"),
    ({"input_ids": [[1], [1000]]}, "input_ids"),
    ({"input_ids": [[1]] * 5000}, "input_ids"),
    ({"input_ids": PROMPT, "sampling_params": {"n": 5000}}, "sampling_params.n"),
    ({"input_ids": PROMPT, "rid": ["a"]}, "rid"),
]


async def test_a_bad_parameter_is_named(stack_of: StackMaker) -> None:
    stack = await stack_of()
    for body, param in BAD:
        response = await stack.facade.http.post("/generate", json=body)
        assert response.status_code == 400, body
        assert response.json()["error"]["param"] == param


async def test_what_there_is_not_says_so(stack_of: StackMaker) -> None:
    stack = await stack_of()
    for path in (
        "/update_weights_from_distributed",
        "/release_memory_occupation",
        "/init_weight_transfer_engine",
    ):
        response = await stack.facade.http.post(path, json={})
        assert response.status_code == 501
        assert "folder" in response.json()["error"]["message"]
