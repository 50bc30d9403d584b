"""Clients that others wrote: TRL's own, and SGLang's router between slime and the facade."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.facade.config import FacadeConfig
from services.platform.launching import tied
from tests.integration.facade.conftest import RunningFacade, Stack, StackMaker, expected
from tests.integration.facade.test_sglang import pairs_of, slime_body
from tests.integration.gateway.conftest import CALL, until
from tests.support.fake_instance import FakeInstance
from tests.support.ports import free_port
from tests.support.trl_alone import import_trl

PROMPTS = [[1, 2, 3], [4, 5]]
SEED = 7
HELD = 5
ROUTER = Path(__file__).parents[3] / ".venv-router/bin/python"


async def test_trls_own_client(stack_of: StackMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    import_trl()
    client = import_module("trl.generation.vllm_client")
    # Asked by its constructor only; what it has of vLLM is for weights.
    monkeypatch.setattr(client, "is_vllm_available", lambda min_version=None: True)
    stack = await stack_of(logprobs_mode="processed")

    def generate() -> Any:
        found = client.VLLMClient(base_url=stack.facade.url)
        assert found.get_world_size() == 1
        return found.generate(
            PROMPTS,
            n=2,
            temperature=0.7,
            top_p=0.9,
            max_tokens=16,
            logprobs=0,
            generation_kwargs={"seed": SEED},
        )

    # It blocks, and the gateway is on this event loop.
    answer = await asyncio.to_thread(generate)
    want = [expected(prompt, slot, SEED, 16) for prompt in PROMPTS for slot in (0, 1)]
    assert answer == {
        "prompt_ids": PROMPTS,
        "completion_ids": [tokens for tokens, _ in want],
        "logprobs": [[[value] for value in values] for _, values in want],
        "logprob_token_ids": [[[token] for token in tokens] for tokens, _ in want],
    }


class Router:
    """An sglang-router in front of facades."""

    def __init__(self, process: asyncio.subprocess.Process, http: httpx.AsyncClient) -> None:
        self.process = process
        self.http = http

    async def workers(self) -> list[str]:
        """Return the URLs of the workers that it uses; none while it starts."""
        assert self.process.returncode is None, "the router has ended"
        try:
            answer = (await self.http.get("/workers")).json()
        except httpx.TransportError:
            return []
        return [worker["url"] for worker in answer["workers"] if worker["is_healthy"]]


@pytest.fixture
async def facades(stack_of: StackMaker) -> AsyncIterator[tuple[Stack, list[RunningFacade]]]:
    """Two facades of one gateway."""
    stack = await stack_of()
    config = FacadeConfig(port=0, gateway=stack.gateway.gateway.address)
    other = await RunningFacade(config).start()
    yield stack, [stack.facade, other]
    await other.stop()


@pytest.fixture
async def router(facades: tuple[Stack, list[RunningFacade]], tmp_path: Path) -> AsyncIterator[Router]:
    if not ROUTER.exists():
        pytest.skip("there is no sglang-router; scripts/sglang-router makes its environment")
    port = free_port()
    command = [
        *(str(ROUTER), "-m", "sglang_router.launch_router"),
        *("--host=127.0.0.1", f"--port={port}", f"--prometheus-port={free_port()}"),
        *("--policy=round_robin", "--worker-urls", *(facade.url for facade in facades[1])),
    ]
    with (tmp_path / "router.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*tied(command), stdout=log, stderr=log)
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=CALL) as http:
                router = Router(process, http)

                async def serves() -> bool:
                    return len(await router.workers()) == len(facades[1])

                await until(serves, "the router serves")
                yield router
        finally:
            process.kill()
            await process.wait()


def grown(facades: list[RunningFacade]) -> list[int]:
    """Return how many samples of each facade have HELD tokens."""
    return [
        sum(len(output.token_ids) == HELD for group in facade.work() for output in group.outputs)
        for facade in facades
    ]


async def test_slimes_rollout_and_abort_loop_through_the_router(
    router: Router, facades: tuple[Stack, list[RunningFacade]]
) -> None:
    """Requests go through the router, aborts to each of its workers; partials go on from their tokens."""
    stack, both = facades
    (fake,) = stack.fakes
    fake.hold_at = HELD
    asking = [asyncio.create_task(ask(router, PROMPTS[0], seed)) for seed in range(6)]
    await until(lambda: sum(grown(both)) == 6, "the samples have grown")
    assert all(grown(both)), "each facade has some of them"
    workers = await router.workers()
    assert sorted(workers) == sorted(facade.url for facade in both)
    async with httpx.AsyncClient(timeout=CALL) as direct:
        for worker in workers:
            (await direct.post(f"{worker}/abort_request", json={"abort_all": True})).raise_for_status()
            loads = (await direct.get(f"{worker}/v1/loads?include=core")).json()["loads"]
            assert [load["num_running_reqs"] for load in loads] == [0]
    partials = await asyncio.gather(*asking)
    want = [expected(PROMPTS[0], 0, seed, HELD, ignore_eos=True) for seed in range(6)]
    assert [pairs_of(answer) for answer in partials] == [list(zip(*each, strict=True)) for each in want]
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in partials} == {"abort"}
    await goes_on(router, fake, want[0][0])


async def goes_on(router: Router, fake: FakeInstance, partial: list[int]) -> None:
    """Check that a partial, sent again with its prompt, gets the rest of its tokens."""
    fake.hold_at = None
    answer = await ask(router, [*PROMPTS[0], *partial], SEED, max_new_tokens=30 - HELD)
    tokens, _ = expected([*PROMPTS[0], *partial], 0, SEED, 30 - HELD, ignore_eos=True)
    assert answer["output_ids"] == tokens


async def ask(router: Router, prompt: list[int], seed: int, **sampling: Any) -> dict[str, Any]:
    body = slime_body(prompt, sampling_seed=seed, ignore_eos=True, **sampling)
    response = await router.http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()
