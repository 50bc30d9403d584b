"""vLLM's dialect against a gateway: the official OpenAI client, TRL's requests, errors, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.facade.conftest import StackMaker, expected
from tests.integration.gateway.conftest import CALL, Cluster, until

PROMPTS = [[1, 2, 3], [4, 5], [1, 2, 3]]
SEED = 7


async def test_the_openai_client_gets_the_samples_of_its_seed(stack_of: StackMaker) -> None:
    stack = await stack_of(instances=2)
    client = stack.facade.openai
    (model,) = (await client.models.list()).data
    assert model.id == "fake"

    async def complete(**more: Any) -> Any:
        return await client.completions.create(
            model="fake",
            prompt=PROMPTS,
            n=2,
            max_tokens=30,
            logprobs=0,
            extra_body={"return_token_ids": True},
            **more,
        )

    answer = await complete(seed=SEED)
    found = [(choice.model_extra["token_ids"], choice.logprobs.token_logprobs) for choice in answer.choices]
    # The third prompt equals the first: its samples are the next ones, not the same ones.
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3)]
    assert found == [expected(PROMPTS[prompt], slot, SEED, 30) for prompt, slot in places]
    for choice, (tokens, _) in zip(answer.choices, found, strict=True):
        assert choice.finish_reason == ("length" if tokens[-1] != 0 else "stop")
        assert choice.text == ""
        assert choice.logprobs.tokens == [f"token_id:{token}" for token in tokens]
        assert choice.model_extra["weight_versions"] == [{"version": "0", "start": 0, "end": len(tokens)}]
    assert [choice.model_extra["prompt_token_ids"] for choice in answer.choices[::2]] == PROMPTS
    assert answer.usage.completion_tokens == sum(len(tokens) for tokens, _ in found)
    again = await complete(seed=SEED)
    assert [c.model_extra["token_ids"] for c in again.choices] == [tokens for tokens, _ in found]
    drawn = [[c.model_extra["token_ids"] for c in (await complete()).choices] for _ in range(2)]
    assert drawn[0] != drawn[1]


async def test_a_stream_has_the_tokens_of_the_whole_answer(stack_of: StackMaker) -> None:
    stack = await stack_of()
    stream = await stack.facade.openai.completions.create(
        model="fake",
        prompt=PROMPTS[1],
        n=3,
        seed=SEED,
        max_tokens=50,
        logprobs=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    logprobs: dict[int, list[float]] = {0: [], 1: [], 2: []}
    ends, used, events = [], None, 0
    async for event in stream:
        events += 1
        used = event.usage or used
        for choice in event.choices:
            tokens[choice.index] += choice.model_extra["token_ids"]
            logprobs[choice.index] += choice.logprobs.token_logprobs
            ends += [choice.finish_reason] if choice.finish_reason else []
    for slot in range(3):
        want = expected(PROMPTS[1], slot, SEED, 50, ignore_eos=True)
        assert (tokens[slot], logprobs[slot]) == want
    assert ends == ["length"] * 3
    assert used is not None
    assert used.completion_tokens == 150
    # Token by token, not all at the end.
    assert events > 4


async def test_text_and_chat_by_the_models_tokenizer(stack_of: StackMaker, tokenizer_folder: Path) -> None:
    stack = await stack_of(model=tokenizer_folder, served_model_name="words")
    client = stack.facade.openai
    tokens, logprobs = expected([3, 4], 0, SEED, 12, ignore_eos=True)
    # The end of a text is a special token, which the text is without.
    text = " ".join(f"w{token}" for token in tokens if token != 0)
    more = {"ignore_eos": True, "return_token_ids": True}
    answer = await client.completions.create(
        model="words", prompt="w3 w4", seed=SEED, max_tokens=12, extra_body=more
    )
    assert answer.choices[0].text == text
    tokens, logprobs = expected([3, 4, 9], 0, SEED, 12, ignore_eos=True)
    text = " ".join(f"w{token}" for token in tokens if token != 0)
    asked: Any = {
        "model": "words",
        "messages": [{"role": "user", "content": "w3 w4"}],
        "seed": SEED,
        "max_completion_tokens": 12,
        "logprobs": True,
        "extra_body": more,
    }
    chat = await client.chat.completions.create(**asked)
    assert chat.choices[0].message.content == text
    assert [each.logprob for each in chat.choices[0].logprobs.content] == logprobs
    assert chat.model_extra["prompt_token_ids"] == [3, 4, 9]
    pieces = [
        choice.delta.content
        async for event in await client.chat.completions.create(stream=True, **asked)
        for choice in event.choices
    ]
    assert "".join(pieces) == text
    assert len(pieces) > 1


async def test_the_requests_of_trls_client(stack_of: StackMaker) -> None:
    """Replay VLLMClient of TRL 1.16: health, the model's name, and generate with token ids."""
    stack = await stack_of()
    http = stack.facade.http
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/get_world_size")).json() == {"world_size": 1}
    model = (await http.get("/v1/models")).json()["data"][0]["id"]
    answer = await stack.facade.post(
        "/v1/completions",
        model=model,
        prompt=PROMPTS[:2],
        return_token_ids=True,
        return_tokens_as_token_ids=True,
        n=2,
        repetition_penalty=1.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        max_tokens=16,
        logprobs=0,
        seed=SEED,
    )
    choices = answer["choices"]
    assert [choice["prompt_token_ids"] for choice in choices[::2]] == PROMPTS[:2]
    want = [expected(PROMPTS[prompt], slot, SEED, 16) for prompt in (0, 1) for slot in (0, 1)]
    assert [choice["token_ids"] for choice in choices] == [tokens for tokens, _ in want]
    for choice, (tokens, values) in zip(choices, want, strict=True):
        entries = choice["logprobs"]
        pairs = zip(entries["tokens"], entries["token_logprobs"], entries["top_logprobs"], strict=True)
        for (name, value, top), token, wanted in zip(pairs, tokens, values, strict=True):
            assert (name, value, top) == (f"token_id:{token}", wanted, {name: value})


async def test_the_requests_of_trls_own_server(stack_of: StackMaker) -> None:
    stack = await stack_of()
    assert (await stack.facade.http.get("/health/")).status_code == 200
    assert (await stack.facade.http.get("/get_world_size/")).json() == {"world_size": 1}
    answer = await stack.facade.post(
        "/generate/",
        prompts=PROMPTS[:2],
        images=None,
        n=2,
        repetition_penalty=1.0,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        max_tokens=16,
        logprobs=0,
        structured_outputs_regex=None,
        generation_kwargs={"seed": SEED},
    )
    want = [expected(PROMPTS[prompt], slot, SEED, 16) for prompt in (0, 1) for slot in (0, 1)]
    assert answer == {
        "prompt_ids": PROMPTS[:2],
        "completion_ids": [tokens for tokens, _ in want],
        "logprobs": [[[value] for value in values] for _, values in want],
        "logprob_token_ids": [[[token] for token in tokens] for tokens, _ in want],
    }


async def test_stop_strings_and_the_likeliest_tokens(stack_of: StackMaker, tokenizer_folder: Path) -> None:
    """The instance ends the sample, and both dialects tell by what, in streams too."""
    stack = await stack_of(model=tokenizer_folder)
    tokens, values = expected(PROMPTS[1], 0, SEED, 30, ignore_eos=True)
    stop, kept = f"w{tokens[9]}", tokens[: tokens.index(tokens[9]) + 1]
    text = " ".join(f"w{token}" for token in kept[:-1]) + " "
    asked: dict[str, Any] = {"prompt": PROMPTS[1], "max_tokens": 30, "seed": SEED, "stop": ["nothing", stop]}
    body = {
        **asked,
        "ignore_eos": True,
        "logprobs": 2,
        "return_token_ids": True,
        "skip_special_tokens": False,
    }
    (choice,) = (await stack.facade.post("/v1/completions", **body))["choices"]
    assert (choice["token_ids"], choice["text"]) == (kept, text)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    for token, value, told in zip(kept, values, choice["logprobs"]["top_logprobs"], strict=False):
        assert told == {f"w{token}": value, f"w{token + 1}": 0.0, f"w{token + 2}": -1 / 64}
    async with stack.facade.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
        lines = [line[6:] async for line in stream.aiter_lines() if line]
    parts = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert "".join(part["text"] for part in parts) == text
    assert parts[-1]["stop_reason"] == stop
    params = {"sampling_seed": SEED, "max_new_tokens": 30, "ignore_eos": True, "stop": stop}
    answer = await stack.facade.post(
        "/generate",
        input_ids=PROMPTS[1],
        sampling_params={**params, "skip_special_tokens": False},
        return_logprob=True,
        top_logprobs_num=1,
    )
    assert (answer["output_ids"], answer["text"]) == (kept, text)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    prompt = PROMPTS[1]
    assert "input_token_logprobs" not in answer["meta_info"]
    (choice,) = (await stack.facade.post("/v1/completions", **body, prompt_logprobs=0))["choices"]
    wanted = [[(str(token), -token / 64)] for token in prompt[1:]]
    assert [[(k, v["logprob"]) for k, v in each.items()] for each in choice["prompt_logprobs"][1:]] == wanted
    assert answer["meta_info"]["output_top_logprobs"] == [[[0.0, (token + 1) % 1000, None]] for token in kept]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"temprature": 1}, "temprature"),
    ({"best_of": 3}, "best_of"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"allowed_token_ids": [1000]}, "allowed_token_ids[0]"),
    ({"echo": True}, "echo"),
    ({"logprobs": 21}, "logprobs"),
    ({"n": 0}, "n"),
    ({"n": 5000}, "n"),
    ({"prompt": "a text"}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1000]}, "prompt"),
    ({"prompt": [[1], [2, 1 << 70]]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [1] * 5000}, "prompt"),
    ({"prompt": [[1]] * 5000}, "prompt"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1e-5}, "temperature"),
    ({"structured_outputs": {"json": {"type": "integer", "multipleOf": 3}}}, "structured_outputs"),
    ({"top_k": 1 << 40}, "top_k"),
    ({"stop_token_ids": [5, -4]}, "stop_token_ids[1]"),
    ({"stop_token_ids": ["5"]}, "stop_token_ids[0]"),
    ({"stop": "\ud83d"}, "stop"),
    ({"request_id": "a\udc00"}, "request_id"),
    ({"structured_outputs": {"json": {"\ud800": 1}}}, "structured_outputs.json.\ufffd"),
    ({"seed": 1 << 64}, "seed"),
    ({"max_tokens": "many"}, "max_tokens"),
]


async def test_a_large_answer_is_whole(stack_of: StackMaker) -> None:
    stack = await stack_of()
    body = {"prompt": [[1], [2]], "n": 20, "seed": SEED, "max_tokens": 300, "ignore_eos": True}
    answer = await stack.facade.post("/v1/completions", **body, logprobs=0, return_token_ids=True)
    want = [expected([p], slot, SEED, 300, ignore_eos=True) for p in (1, 2) for slot in range(20)]
    found = [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]]
    assert found == want


async def test_a_bad_parameter_is_named(stack_of: StackMaker) -> None:
    stack = await stack_of()
    for changes, param in BAD:
        response = await stack.facade.http.post(
            "/v1/completions",
            content=json.dumps({"prompt": [1], **changes}),
            headers={"content-type": "application/json"},
        )
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "invalid_request_error"), changes
        assert (error["param"], error["code"]) == (param, "INVALID_ARGUMENT")
        # A schema that the gateway refuses has its own name there.
        name = param.partition("[")[0]
        assert name in error["message"] or f"{name}: sampling.json_schema:" in f"{name}: {error['message']}"
    assert (await stack.facade.post("/v1/completions", prompt=[1], max_tokens=1))["choices"]


async def test_a_model_has_the_name_that_it_is_served_under_and_another_is_not_found(
    stack_of: StackMaker,
) -> None:
    stack = await stack_of(served_model_name="org/policy,policy")
    models = (await stack.facade.http.get("/v1/models")).json()["data"]
    assert [(model["id"], model["root"]) for model in models] == [
        ("org/policy", "org/policy"),
        ("policy", "org/policy"),
    ]
    for path in ("/v1/completions", "/generate"):
        prompt = {"input_ids": [1]} if path == "/generate" else {"prompt": [1], "max_tokens": 1}
        # A small body is read here, a large one by a worker.
        for more in ({}, {"user" if "prompt" in prompt else "rid": "x" * 70_000}):
            response = await stack.facade.http.post(path, json={**prompt, "model": "fake", **more})
            error = response.json()["error"]
            assert (response.status_code, error["type"]) == (404, "not_found_error")
            assert (error["param"], error["code"]) == ("model", "MODEL_NOT_FOUND")
            assert "'org/policy' or 'policy'" in error["message"]
    with pytest.raises(openai.NotFoundError):
        await stack.facade.openai.completions.create(model="fake", prompt=[1])
    for name in ("org/policy", "policy"):
        answer = await stack.facade.openai.completions.create(model=name, prompt=[1], max_tokens=1)
        assert answer.model == "org/policy"


async def test_values_that_ask_for_nothing_are_taken(stack_of: StackMaker) -> None:
    stack = await stack_of()
    await stack.facade.post(
        "/v1/completions", prompt=[1], max_tokens=1, stop=[], best_of=1, echo=False, logit_bias=None, user="u"
    )
    # sglang-router writes these into every body.
    router = {"no_stop_trim": False, "skip_special_tokens": True, "return_hidden_states": False}
    await stack.facade.post("/v1/completions", prompt=[1], max_tokens=1, echo=False, **router)


async def test_a_client_that_leaves_ends_its_samples(stack_of: StackMaker) -> None:
    stack = await stack_of()
    (fake,) = stack.fakes
    fake.hold_at = 5
    body = {"prompt": [1, 2], "n": 3, "max_tokens": 100, "ignore_eos": True}
    asking = asyncio.create_task(stack.facade.http.post("/v1/completions", json=body))
    await until(lambda: len(fake.running()) == 3, "the samples run")
    asking.cancel()
    await until(lambda: not fake.running(), "the samples of the first client are gone")
    async with stack.facade.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data: "):
                break
        # The first tokens of one sample may come before the instance has the others.
        await until(lambda: len(fake.running()) == 3, "all samples of the second client run")
    await until(lambda: not fake.running(), "the samples of the second client are gone")
    await until(lambda: stack.facade.metric("samples_in_flight") == 0, "nothing is in work")
    assert stack.facade.metric("disconnects_total") == 2


async def test_a_sample_survives_its_gateway(stack_of: StackMaker, cluster: Cluster) -> None:
    stack = await stack_of()
    port = stack.gateway.gateway.address.rpartition(":")[2]
    (fake,) = stack.fakes
    fake.hold_at = 9
    body = {"prompt": [1, 2], "seed": SEED, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
    tokens: list[int] = []
    async with stack.facade.http.stream(
        "POST", "/v1/completions", json={**body, "stream": True, "logprobs": 0}
    ) as stream:
        async for line in stream.aiter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line[6:])["choices"]
            tokens += choice["token_ids"]
            if fake.hold_at is not None and len(tokens) >= 5:
                await stack.gateway.kill()
                fake.hold_at = None
                await cluster.gateway(port=int(port))
    assert tokens == expected([1, 2], 0, SEED, 60, ignore_eos=True)[0]
    # The second gateway knows of the tokens since it went on, and counts them from the first one.
    (span,) = choice["weight_versions"]
    assert (span["version"], span["end"]) == ("0", 60)
    assert 4 <= span["start"] <= 8


async def test_a_request_beyond_its_time_is_a_timeout(stack_of: StackMaker) -> None:
    stack = await stack_of(max_request_seconds=0.3)
    stack.fakes[0].hold_at = 5
    response = await stack.facade.http.post("/v1/completions", json={"prompt": [1], "ignore_eos": True})
    assert response.status_code == 504
    await until(lambda: not stack.fakes[0].running(), "the sample is gone")


async def test_too_much_at_once_is_told_when_to_come_again(stack_of: StackMaker) -> None:
    stack = await stack_of(max_concurrent_samples=3)
    (fake,) = stack.fakes
    fake.hold_at = 5
    body = {"prompt": [1, 2], "n": 3, "max_tokens": 20, "ignore_eos": True}
    asking = asyncio.create_task(stack.facade.http.post("/v1/completions", json=body))
    await until(lambda: len(fake.running()) == 3, "the samples run")
    with pytest.raises(openai.RateLimitError) as refused:
        await stack.facade.openai.completions.create(model="fake", prompt=[1])
    assert refused.value.response.headers["retry-after"] == "1"
    fake.hold_at = None
    assert (await asking).status_code == 200


async def test_without_a_gateway_it_is_unavailable(stack_of: StackMaker) -> None:
    stack = await stack_of(retry_seconds=0.0)
    await stack.gateway.kill()
    for path, body in (("/v1/completions", {"prompt": [1]}), ("/health", None), ("/readyz", None)):
        call = stack.facade.http.post(path, json=body) if body else stack.facade.http.get(path)
        response = await asyncio.wait_for(call, CALL)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
    assert (await stack.facade.http.get("/livez")).status_code == 200


async def test_the_api_is_described(stack_of: StackMaker) -> None:
    stack = await stack_of()
    described = (await stack.facade.http.get("/openapi.json")).json()
    body = described["components"]["schemas"]["CompletionBody"]["properties"]
    assert "drawn" in body["seed"]["description"]
    page = await stack.facade.http.get("/docs")
    assert page.status_code == 200
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert not re.search(r"<script|https?://", page.text), "it works without a network"
    for name, field in described["components"]["schemas"]["CompletionBody"]["properties"].items():
        assert f"<code>{name}</code>" in page.text, field
    for path, methods in described["paths"].items():
        assert all(f"{method.upper()} {path}</code>" in page.text for method in methods)
    unknown = await stack.facade.http.get("/v2/nothing")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "404")


async def test_version_and_metrics_are_where_vllm_has_them(stack_of: StackMaker) -> None:
    http = (await stack_of()).facade.http
    assert (await http.get("/version")).json() == {"version": metadata.version("paceline")}
    await http.post("/v1/completions", json={"prompt": [1], "max_tokens": 3, "ignore_eos": True})
    scraped = await http.get("/metrics")
    assert scraped.headers["content-type"].startswith("text/plain")
    (total,) = [
        sample.value
        for family in text_string_to_metric_families(scraped.text)
        for sample in family.samples
        if sample.name == "paceline_facade_tokens_total" and sample.labels == {"dialect": "vllm"}
    ]
    assert total == 3


async def test_a_body_that_is_too_long_is_refused(stack_of: StackMaker) -> None:
    stack = await stack_of(max_message_bytes=4096)
    response = await stack.facade.http.post("/v1/completions", json={"prompt": [1] * 4096})
    assert response.status_code == 413

    async def pieces() -> Any:
        yield b"{}"

    chunked = await stack.facade.http.post(
        "/v1/completions", content=pieces(), headers={"content-type": "application/json"}
    )
    assert chunked.status_code == 411
    assert isinstance(chunked, httpx.Response)
