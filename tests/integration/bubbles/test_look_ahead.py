"""Coverage of steps that nobody announces by hand: that of a run that does, with the same idle time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from paceline import AsyncClient, Group, Sample, SamplingParams
from services.facade.config import FacadeConfig
from services.facade.dialects.body import prompt_id_of
from tests.integration.bubbles.conftest import Coordinator, Poller, progress
from tests.integration.facade.conftest import RunningFacade
from tests.integration.gateway.conftest import CALL, Cluster, RunningGateway, until
from tests.support.fake_instance import FakeInstance

Coordinate = Callable[..., Awaitable[Coordinator]]

GROUPS, SAMPLES, LIMIT = 3, 2, 8
AHEAD = 6
"""Tokens of each sample for which an instance has the time before the step begins."""
EPOCH = [[[1 + GROUPS * step + place, 2] for place in range(GROUPS)] for step in range(3)]
SAMPLING = SamplingParams(max_tokens=LIMIT, ignore_eos=True)
CLOSE = 0.05


@pytest.fixture
async def cluster(redis_url: str, namespace: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(redis_url, namespace)
    yield cluster
    await cluster.close()


class IdleInstance:
    """An instance that is idle between steps, and pre-generates `AHEAD` tokens of each sample that it is given."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._poller = Poller(coordinator, "i0")
        self.seeds: dict[int, set[int]] = {}
        """Seeds of what was pre-generated, by step."""

    async def fill(self, step: int) -> None:
        """Pre-generate what is announced of a step; fails where nothing is."""

        async def filled() -> bool:
            tasks = (await self._poller.poll()).tasks
            for task in tasks:
                self.seeds.setdefault(task.step, set()).add(task.seed)
            await self._poller.poll(progress(tasks, AHEAD, finished=True), room=0)
            return len(await self._coordinator.coverage(step)) >= GROUPS * SAMPLES

        await until(filled, f"step {step} is announced")


async def platform(
    cluster: Cluster, coordinate: Coordinate
) -> tuple[RunningGateway, FakeInstance, IdleInstance]:
    coordinator = await coordinate()
    gateway = await cluster.gateway(coverage_timeout_seconds=CALL)
    fake = await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    link = gateway.gateway.leadership.leading().coordinator
    await until(lambda: link.connections, "the coordinator is found")
    return gateway, fake, IdleInstance(coordinator)


def groups_of(prompts: list[list[int]]) -> list[Group]:
    return [Group(prompt_id_of(prompt), prompt, SAMPLES) for prompt in prompts]


@pytest.mark.parametrize("by_hand", [True, False], ids=["run.hint", "run.rollouts"])
async def test_the_sdk_looks_ahead_as_far_as_a_trainer_that_hints(
    cluster: Cluster, coordinate: Coordinate, by_hand: bool
) -> None:
    gateway, _, idle = await platform(cluster, coordinate)
    batches, read = [groups_of(prompts) for prompts in EPOCH], list[Sample]()
    async with AsyncClient(gateway.gateway.address) as client, client.run("run", seed=7) as run:
        if by_hand:
            for step, groups in enumerate(batches):
                rollout = await run.rollout(step, groups, SAMPLING)
                if step + 1 < len(batches):
                    await run.hint(step + 1, batches[step + 1], SAMPLING, policy_version=0)
                read += [sample async for sample in rollout]
                if step + 1 < len(batches):
                    await idle.fill(step + 1)
        else:
            step = 0
            async for rollout in run.rollouts(iter(batches), SAMPLING):
                read += [sample async for sample in rollout]
                step += 1
                if step < len(batches):
                    await idle.fill(step)
    assert len(read) == GROUPS * SAMPLES * len(EPOCH)
    await until(lambda: gateway.metric("step_seconds_count") == len(EPOCH), "the steps are counted")
    coverage = gateway.metric("pregenerated_tokens_total") / gateway.metric("announced_step_tokens_total")
    # The same for both, so within it of each other.
    assert coverage == pytest.approx(AHEAD / LIMIT, abs=CLOSE)
    assert gateway.metric("unannounced_steps_total") == 1
    for step in range(1, len(EPOCH)):
        assert idle.seeds[step] == {
            sample.seed for sample in read[step * GROUPS * SAMPLES : (step + 1) * GROUPS * SAMPLES]
        }


@pytest.mark.parametrize("by_hand", [True, False], ids=["/paceline/v1/hint", "epoch before"])
async def test_the_facade_looks_ahead_as_far_as_a_trainer_that_hints(
    cluster: Cluster, coordinate: Coordinate, by_hand: bool
) -> None:
    gateway, fake, idle = await platform(cluster, coordinate)
    facade = await RunningFacade(FacadeConfig(port=0, gateway=gateway.gateway.address, run_id="run")).start()
    steps, body = EPOCH * 2, {"n": SAMPLES, "max_tokens": LIMIT, "ignore_eos": True}
    # Without hints by hand the first step of the second epoch is known again, and the next one shows that it is.
    first = 1 if by_hand else len(EPOCH) + 2
    try:
        for step, prompts in enumerate(steps):
            headers = {"X-Paceline-Step": str(step)}
            if by_hand and step + 1 < len(steps):
                coming = {**body, "step": step + 1, "prompts": steps[step + 1]}
                await facade.post("/paceline/v1/hint", **coming)
            asking = (
                facade.http.post("/v1/completions", json={**body, "prompt": prompt}, headers=headers)
                for prompt in prompts
            )
            assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}
            if first <= step + 1 < len(steps):
                await idle.fill(step + 1)
    finally:
        await facade.stop()
    for step in range(first, len(steps)):
        assert idle.seeds[step] == {item.seed for item in fake.accepted if item.step == step}
    assert gateway.metric("unannounced_steps_total") == first
