"""Tenants of one facade: runs, aborts and quotas of tokens are those that the gateway has, over HTTP, too."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from paceline.tokens import hash_token
from paceline.v1 import rollout_pb2
from services.facade import serving
from services.facade.access import ABSENT, METHODS
from services.facade.sample_names import PROMPT, RUN
from tests.integration.facade.conftest import Stack, StackMaker
from tests.integration.gateway.conftest import until

TOKENS = {"prompt": [1, 2], "max_tokens": 4, "ignore_eos": True}
WITH_RUN: dict[str, dict[str, Any]] = {
    "/v1/completions": TOKENS,
    "/generate": {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}},
    "/generate/": {"prompts": [[1, 2]], "max_tokens": 4, "generation_kwargs": {"ignore_eos": True}},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4, "ignore_eos": True}},
    "/paceline/v1/hint": {"step": 9, "prompts": [[1, 2]], "max_tokens": 4, "n": 1},
    "/paceline/v1/rewards": {"step": 0, "rewards": [{"prompt_id": "p", "slot": 0, "reward": 1.0}]},
    "/update_weights": {"weight_dir": "/nowhere"},
    "/update_weights_from_disk": {"model_path": "/nowhere"},
}
"""A body for each path whose request belongs to a run; chat is as completions, and needs a tokenizer."""
OF_NO_RUN = {
    *("/v1/models", "/get_world_size", "/get_world_size/", "/detokenize", "/tokenize", "/server_info"),
    *("/get_server_info", "/model_info", "/get_model_info", "/get_weight_version", "/v1/loads", "/is_paused"),
    *("/abort_request", "/abort_requests", "/inference/v1/abort_requests", "/metrics", "/finish_session"),
    *(
        "/continue_generation",
        "/flush_cache",
        "/pause",
        "/pause_generation",
        "/reset_prefix_cache",
        "/resume",
    ),
}
"""Paths about the model, the weights or the requests of a facade; of these, aborts are of the caller's runs."""


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    every = ["rollouts", "weights"]
    entries: list[dict[str, Any]] = [
        {"name": "alice", "scopes": every, "runs": ["a-*"]},
        {"name": "bob", "scopes": every, "runs": ["b-*", "b"]},
        {"name": "few", "scopes": every, "runs": ["few"], "max_queued_samples": 3},
        {"name": "anything", "scopes": every},
    ]
    path = tmp_path / "tokens.yaml"
    path.write_text(yaml.safe_dump([{**entry, "sha256": hash_token(entry["name"])} for entry in entries]))
    return path


@pytest.fixture
def tenants(stack_of: StackMaker, tokens_file: Path) -> Any:
    async def make() -> Stack:
        gateway = {"tokens_file": tokens_file, "token": "own"}
        # Only the facade and the gateway agree on a token: who is refused was told apart by it.
        return await stack_of(gateway=gateway, tokens_file=tokens_file, token="own", retry_seconds=0)

    return make


def of(token: str, run: str | None = None, **more: str) -> dict[str, str]:
    named = {} if run is None else {RUN: run}
    return {"Authorization": f"Bearer {token}", **named, **more}


async def post(stack: Stack, path: str, headers: dict[str, str]) -> httpx.Response:
    return await stack.facade.http.post(path, json=WITH_RUN[path], headers=headers)


def test_every_path_is_of_a_run_or_of_none() -> None:
    generating = {"/v1/chat/completions"}
    absent = {path for path in METHODS if path not in OF_NO_RUN | WITH_RUN.keys() | generating}
    assert absent == set(ABSENT)


async def test_a_request_is_for_the_runs_of_its_token(tenants: Any) -> None:
    stack = await tenants()
    for path in WITH_RUN:
        theirs = await post(stack, path, of("alice", "b-1"))
        assert (theirs.status_code, theirs.json()["error"]["code"]) == (403, "RUN_NOT_GRANTED"), path
        assert "'b-1'" in theirs.json()["error"]["message"]
        # That of the facade, since it names none.
        nothing = await post(stack, path, of("alice"))
        assert (nothing.status_code, nothing.json()["error"]["code"]) == (403, "RUN_NOT_GRANTED"), path
        mine = await post(stack, path, of("alice", "a-1"))
        assert mine.status_code != 403, (path, mine.text)
        # That which bob's token names in full.
        assert (await post(stack, path, of("bob"))).status_code != 403, path
        assert (await post(stack, path, of("anything"))).status_code != 403, path


async def test_the_gateway_is_told_for_whom_it_is_called(tenants: Any, monkeypatch: Any) -> None:
    """Even where the facade would forget to look at the run."""
    stack = await tenants()
    monkeypatch.setattr(serving, "current_caller", lambda: None)
    for path in ("/v1/completions", "/paceline/v1/hint", "/paceline/v1/rewards", "/update_weights"):
        theirs = await post(stack, path, of("alice", "b-1"))
        assert (theirs.status_code, theirs.json()["error"]["code"]) == (403, "RUN_NOT_GRANTED"), path


async def hold(
    stack: Stack, tasks: asyncio.TaskGroup, **runs: tuple[str, str]
) -> dict[str, asyncio.Task[Any]]:
    """Return requests, by name of (token, run), that have tokens and do not end."""
    (fake,) = stack.fakes
    fake.hold_at = 2
    made = {}
    for name, (token, run) in runs.items():
        body = {**TOKENS, "max_tokens": 20, "request_id": name, "return_token_ids": True}
        made[name] = tasks.create_task(
            stack.facade.http.post("/v1/completions", json=body, headers=of(token, run, **{PROMPT: name}))
        )
    await until(
        lambda: (
            sum(len(o.token_ids) == 2 for group in stack.facade.work() for o in group.outputs) == len(runs)
        ),
        "the samples have grown",
    )
    return made


async def ended(*tasks: asyncio.Task[Any]) -> list[str]:
    return [(await task).json()["choices"][0]["finish_reason"] for task in tasks]


ABORTS: list[tuple[str, dict[str, Any]]] = [
    ("/abort_request", {"abort_all": True}),
    ("/pause_generation", {"mode": "abort"}),
    ("/pause?mode=abort", {}),
    # Named one by one, which includes what is not one's own.
    ("/abort_requests", {"request_ids": ["mine", "also", "theirs"]}),
]


async def test_an_abort_ends_the_samples_of_the_callers_runs(tenants: Any) -> None:
    stack = await tenants()
    for path, body in ABORTS:
        async with asyncio.TaskGroup() as tasks:
            made = await hold(
                stack, tasks, mine=("alice", "a-1"), also=("anything", "a-2"), theirs=("bob", "b-1")
            )

            async def abort(token: str, path: str, **body: Any) -> dict[str, Any]:
                said = await stack.facade.http.post(path, json=body, headers=of(token))
                assert said.status_code == 200, said.text
                return dict(said.json())

            await abort("alice", path, **body)
            assert await ended(made["mine"], made["also"]) == ["abort", "abort"], path
            assert not made["theirs"].done(), path
            # What there is of others looks like what there is not.
            for named in ("theirs", "nothing"):
                told = await abort("alice", "/abort_requests", request_ids=[named])
                assert told == {"aborted_samples": 0}
            # A token of any run ends all, as ever.
            await abort("anything", "/abort_request", abort_all=True)
            assert await ended(made["theirs"]) == ["abort"]
            await abort("alice", "/continue_generation")


async def test_samples_over_http_and_grpc_are_of_one_quota(tenants: Any) -> None:
    stack = await tenants()
    (fake,) = stack.fakes
    async with asyncio.TaskGroup() as tasks:
        made = await hold(stack, tasks, one=("few", "few"), two=("few", "few"))
        assert stack.gateway.metric("grant_unfinished_samples", grant="few") == 2
        body = {**TOKENS, "n": 2}
        full = await stack.facade.http.post("/v1/completions", json=body, headers=of("few"))
        assert (full.status_code, full.json()["error"]["code"]) == (429, "RESOURCE_EXHAUSTED")
        assert "unfinished samples" in full.json()["error"]["message"]
        assert full.headers["retry-after"] == "1"
        group = rollout_pb2.Group(prompt_id="p", prompt_token_ids=[1], samples=1)
        request = rollout_pb2.SubmitRolloutsRequest(run_id="few", batch_id="b", groups=[group])
        metadata = (("authorization", "Bearer few"),)
        await until(
            lambda: stack.gateway.metric("grant_unfinished_samples", grant="few") == 2, "the refused are gone"
        )
        await stack.gateway.trainer.rollouts.SubmitRollouts(request, timeout=60, metadata=metadata)
        assert stack.gateway.metric("grant_unfinished_samples", grant="few") == 3
        fake.hold_at = None
        assert await ended(*made.values()) == ["length", "length"]


async def test_tokenizing_counts_against_the_rate(stack_of: StackMaker, tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    entry = {"name": "slow", "sha256": hash_token("slow"), "scopes": ["rollouts"]}
    path.write_text(yaml.safe_dump([{**entry, "requests_per_second": 0.001, "burst": 2}]))
    http = (await stack_of(tokens_file=path)).facade.http
    bodies: dict[str, dict[str, Any]] = {"/tokenize": {"prompt": "w1"}, "/detokenize": {"tokens": [1]}}
    # This facade has no tokenizer: what cannot be answered counts, too.
    for endpoint, body in bodies.items():
        answered = await http.post(endpoint, json=body, headers=of("slow"))
        assert answered.status_code == 400, answered.text
    for endpoint, body in bodies.items():
        limited = await http.post(endpoint, json=body, headers=of("slow"))
        assert (limited.status_code, limited.json()["error"]["code"]) == (429, "RESOURCE_EXHAUSTED")
        assert int(limited.headers["retry-after"]) > 100
