"""Names and seeds of samples over HTTP: counted, given, kept by what is resumed, hinted and rewarded."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.contracts.seeds import sample_seed
from services.facade.config import FacadeConfig
from services.facade.dialects.body import prompt_id_of
from services.platform.launching import tied
from tests.integration.facade.conftest import RunningFacade, Stack, StackMaker, expected
from tests.integration.gateway.conftest import CALL, until
from tests.support.fake_instance import response_of, token_at
from tests.support.ports import free_port

PROMPT = [1, 2, 3]
SEED, HELD, LIMIT = 7, 5, 24
BODY: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": LIMIT,
    "ignore_eos": True,
    "logprobs": 0,
    "return_token_ids": True,
}


async def choices_of(facade: RunningFacade, headers: dict[str, str], **body: Any) -> list[dict[str, Any]]:
    response = await facade.http.post("/v1/completions", json={**BODY, **body}, headers=headers)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["choices"]
    return found


async def until_held(stack: Stack, facade: RunningFacade, samples: int = 1) -> None:
    def held() -> bool:
        return sum(len(o.token_ids) == HELD for group in facade.work() for o in group.outputs) == samples

    await until(held, "the facade has the first tokens")


@pytest.fixture
async def other(stack_of: StackMaker) -> AsyncIterator[tuple[Stack, RunningFacade]]:
    """A stack, and a second facade of its gateway."""
    stack = await stack_of()
    second = await RunningFacade(FacadeConfig(port=0, gateway=stack.gateway.gateway.address)).start()
    yield stack, second
    await second.stop()


async def test_equal_requests_are_samples_of_one_prompt_and_of_the_published_step(
    stack_of: StackMaker, tmp_path: Path
) -> None:
    stack = await stack_of(instances=2)
    found = [choice for _ in range(2) for choice in await choices_of(stack.facade, {}, n=2)]
    prompt_id = prompt_id_of(PROMPT)
    names = [{"step": 0, "prompt_id": prompt_id, "slot": slot} for slot in range(4)]
    assert [choice["paceline"] for choice in found] == names
    assert len({tuple(choice["token_ids"]) for choice in found}) == 4
    await stack.facade.post("/update_weights", weight_dir=str(tmp_path))
    (after,) = await choices_of(stack.facade, {})
    assert after["paceline"] == {"step": 1, "prompt_id": prompt_id, "slot": 0}
    # Instances look up the rollouts of the prompt, and of the sample.
    items = [item for fake in stack.fakes for item in fake.accepted]
    assert {(item.run_id, item.prompt_id) for item in items} == {("http", prompt_id)}
    assert sorted((item.step, item.slot) for item in items) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]


async def test_a_named_sample_is_the_same_on_every_facade(other: tuple[Stack, RunningFacade]) -> None:
    stack, second = other
    headers = {"X-Paceline-Step": "9", "X-Paceline-Prompt": "p17", "X-Paceline-Slot": "3"}
    want = [response_of(sample_seed(SEED, 9, "p17", slot), 0, LIMIT, ignore_eos=True)[0] for slot in (3, 4)]
    for facade in (stack.facade, second):
        found = await choices_of(facade, headers, n=2, seed=SEED)
        assert [choice["token_ids"] for choice in found] == want
        assert found[1]["paceline"] == {"step": 9, "prompt_id": "p17", "slot": 4}
    # And goes on anywhere, where it is said which tokens it has.
    prefix = {**headers, "X-Paceline-Prefix": str(HELD)}
    (rest,) = await choices_of(
        second, prefix, seed=SEED, prompt=PROMPT + want[0][:HELD], max_tokens=LIMIT - HELD
    )
    assert rest["token_ids"] == want[0][HELD:]
    assert rest["prompt_token_ids"] == PROMPT + want[0][:HELD]


@pytest.mark.parametrize("seed", [None, SEED])
async def test_a_resent_request_has_the_tokens_of_one_that_was_not_aborted(
    stack_of: StackMaker, seed: int | None
) -> None:
    """AReaL's loop: two samples of a prompt are aborted twice, and each goes on as itself."""
    stack = await stack_of()
    (fake,) = stack.fakes
    params = {"max_new_tokens": LIMIT, "ignore_eos": True, "sampling_seed": seed}
    bodies = [{"input_ids": PROMPT, "sampling_params": params, "return_logprob": True} for _ in range(2)]
    if seed is not None:
        bodies[1]["sampling_params"] = {**params, "sampling_seed": seed + 1}
    tokens: list[list[tuple[int, float]]] = [[], []]
    for at in (HELD, 2 * HELD, None):
        fake.hold_at = at
        rests = [
            {
                **body,
                "input_ids": PROMPT + [token for token, _ in have],
                "sampling_params": {**body["sampling_params"], "max_new_tokens": LIMIT - len(have)},
            }
            for body, have in zip(bodies, tokens, strict=True)
        ]
        asking = [asyncio.create_task(stack.facade.post("/generate", **rest)) for rest in rests]
        if at is not None:
            await until_held(stack, stack.facade, 2)
            await stack.facade.post("/abort_request", abort_all=True)
        for have, answer in zip(tokens, await asyncio.gather(*asking), strict=True):
            have += [(entry[1], entry[0]) for entry in answer["meta_info"]["output_token_logprobs"]]
    assert len({item.seed for item in fake.accepted}) == 2, "each keeps its noise"
    seeds = [next(i.seed for i in fake.accepted if token_at(i.seed, 0, 0) == have[0]) for have in tokens]
    for have, own in zip(tokens, seeds, strict=True):
        assert have == list(zip(*response_of(own, 0, LIMIT, ignore_eos=True), strict=True))
    assert seeds[0] != seeds[1]


async def test_a_facade_that_is_killed_frees_its_sample_and_another_gives_the_same_tokens(
    stack_of: StackMaker, tmp_path: Path
) -> None:
    stack = await stack_of()
    (fake,) = stack.fakes
    fake.hold_at = HELD
    port = free_port()
    command = [sys.executable, "-m", "services.facade", "--port", str(port)]
    command += ["--gateway", stack.gateway.gateway.address]
    with (tmp_path / "facade.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*tied(command), stdout=log, stderr=log)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=CALL) as http:

        async def lives() -> bool:
            assert process.returncode is None, (tmp_path / "facade.log").read_text()
            try:
                return (await http.get("/livez")).status_code == 200
            except httpx.TransportError:
                return False

        await until(lives, "the facade lives")
        asking = asyncio.create_task(http.post("/v1/completions", json={**BODY, "seed": SEED}))
        await until(lambda: [s.length for s in fake.running()] == [HELD], "the sample is under way")
        process.kill()
        await process.wait()
        with pytest.raises(httpx.TransportError):
            await asking
    await until(lambda: not fake.running(), "the sample of the dead facade is gone")
    fake.hold_at = None
    (choice,) = await choices_of(stack.facade, {}, seed=SEED)
    assert (choice["token_ids"], choice["logprobs"]["token_logprobs"]) == expected(
        PROMPT, 0, SEED, LIMIT, ignore_eos=True
    )


async def test_hinted_prompts_have_the_seeds_of_the_requests_to_come(stack_of: StackMaker) -> None:
    stack = await stack_of()
    http, (fake,) = stack.facade.http, stack.fakes
    answer = await stack.facade.post(
        "/paceline/v1/hint", step=1, prompts=[PROMPT, [4], PROMPT], n=2, max_tokens=LIMIT
    )
    assert answer == {"samples": 6}
    hints = stack.gateway.gateway.leadership.leading().hinting.book.runs["http"].hints
    groups = {group.prompt_id: list(group.seeds) for group in hints[1].message.groups}
    assert {prompt_id: len(seeds) for prompt_id, seeds in groups.items()} == {
        prompt_id_of(PROMPT): 4,
        prompt_id_of([4]): 2,
    }
    await choices_of(stack.facade, {"X-Paceline-Step": "1"}, n=4)
    assert sorted(item.seed for item in fake.accepted) == sorted(groups[prompt_id_of(PROMPT)])
    assert not hints, "its step has begun"
    for body, param in (
        ({"step": 1, "prompts": [PROMPT], "prompt_ids": []}, "prompt_ids"),
        ({"step": -1, "prompts": [PROMPT]}, "step"),
        ({"step": 1, "prompts": ["a text"]}, "prompts"),
        ({"step": 1, "prompts": [[1000]]}, "prompts"),
        ({"step": 1, "prompts": [PROMPT], "stop_regex": "x"}, "stop_regex"),
    ):
        response = await http.post("/paceline/v1/hint", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_of_several_facades_a_hint_names_the_seed(stack_of: StackMaker) -> None:
    stack = await stack_of(alone=False)
    body = {"step": 1, "prompts": [PROMPT], "n": 2, "max_tokens": 8, "prompt_ids": ["p17"]}
    response = await stack.facade.http.post("/paceline/v1/hint", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "seed")
    assert (await stack.facade.post("/paceline/v1/hint", **body, seed=SEED)) == {"samples": 2}
    hints = stack.gateway.gateway.leadership.leading().hinting.book.runs["http"].hints
    (group,) = hints[1].message.groups
    assert list(group.seeds) == [sample_seed(SEED, 1, "p17", slot) for slot in (0, 1)]
    # Slots that are counted here are hardly those of another facade, as are the seeds.
    (choice,) = await choices_of(stack.facade, {})
    assert choice["paceline"]["slot"] % (1 << 16) == 0


async def test_rewards_go_by_the_names_in_the_answers(stack_of: StackMaker) -> None:
    stack = await stack_of()
    http = stack.facade.http
    found = [choice["paceline"] for choice in await choices_of(stack.facade, {"X-Paceline-Run": "mine"}, n=2)]
    rewards = [
        {"prompt_id": each["prompt_id"], "slot": each["slot"], "reward": 0.5}
        for each in [*found, {"prompt_id": "unknown", "slot": 0}]
    ]
    body = {"step": found[0]["step"], "rewards": rewards}
    response = await http.post("/paceline/v1/rewards", json=body, headers={"X-Paceline-Run": "mine"})
    assert (response.status_code, response.json()) == (200, {"matched": 2})
    assert await stack.facade.post("/paceline/v1/rewards", **body) == {"matched": 0}, "of another run"
    for wrong, param in (
        ({"step": 0, "rewards": [{**rewards[0], "batch": "b"}]}, "rewards[0].batch"),
        ({"step": 0, "rewards": [rewards[0], rewards[0]]}, "rewards[1]"),
        ({"rewards": []}, "step"),
    ):
        response = await http.post("/paceline/v1/rewards", json=wrong)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_header_that_is_no_number_is_refused_by_its_name(stack_of: StackMaker) -> None:
    stack = await stack_of()
    response = await stack.facade.http.post(
        "/v1/completions", json=BODY, headers={"X-Paceline-Step": "the next"}
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "X-Paceline-Step")
    response = await stack.facade.http.post("/v1/completions", json=BODY, headers={"X-Paceline-Run": "a run"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "run_id")
