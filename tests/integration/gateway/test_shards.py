"""One batch over two deployments, each with a gateway, a journal and instances: the samples of one deployment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import (
    AsyncClient,
    Client,
    Group,
    InFlight,
    RetryPolicy,
    Reward,
    SampleStatus,
    SamplingParams,
    Shard,
)
from paceline.calls.fleet import WeightUpdateCalls
from paceline.errors import SHARD_NOT_NAMED, SHARDS_DIFFER
from paceline.shards import assign
from paceline.v1 import weight_pb2
from services.contracts.errors import DataLoss, InvalidArgument
from services.contracts.seeds import sample_seed
from services.gateway.state.update_book import UpdatePhase
from tests.integration.gateway.conftest import CALL, Cluster, RunningGateway, until
from tests.support.fake_instance import FakeInstance, response_of
from tests.support.ports import free_port

GROUPS = [Group(f"p{number}", [1, 2, 3 + number], 8) for number in range(12)]
KEYS = [(group.prompt_id, slot) for group in GROUPS for slot in range(group.samples)]
LIMIT, STEP, SEED = 40, 3, 11
SAMPLING = SamplingParams(max_tokens=LIMIT)
LEASE = 10.0
RETRY = RetryPolicy(seconds=CALL, maximum=0.5)
IMPATIENT = RetryPolicy(seconds=0.3, initial=0.05)


def expected() -> dict[tuple[str, int], list[int]]:
    """The tokens of every sample of an undisturbed run on one deployment."""
    return {key: response_of(sample_seed(SEED, STEP, *key), 0, LIMIT)[0] for key in KEYS}


def tokens(samples: list[paceline.Sample]) -> dict[tuple[str, int], list[int]]:
    found = {(sample.prompt_id, sample.slot): sample.token_ids.tolist() for sample in samples}
    assert len(found) == len(samples)
    return found


@dataclass
class Deployment:
    """One shard as the test sees it."""

    cluster: Cluster
    gateway: RunningGateway
    fake: FakeInstance

    async def restart(self) -> None:
        """Replace the gateway by one that takes its batches over, at the same address."""
        port = self.gateway.gateway.server.port
        await self.gateway.kill()
        self.gateway = await self.cluster.gateway(port=port, lease_seconds=LEASE)
        await self.cluster.serving(self.gateway, 1)

    def prompts(self) -> set[str]:
        return {item.prompt_id for item in self.fake.accepted}


@pytest.fixture
async def shards(redis_url: str, namespace: str) -> AsyncIterator[list[Deployment]]:
    """Two deployments that share a server of Redis, and nothing in it."""
    clusters = [Cluster(redis_url, f"{namespace}-{name}") for name in "ab"]
    deployments = list[Deployment]()
    for cluster in clusters:
        gateway = await cluster.gateway(port=free_port(), lease_seconds=LEASE)
        deployments.append(Deployment(cluster, gateway, await cluster.instance("i0")))
        await cluster.serving(gateway, 1)
    yield deployments
    for cluster in clusters:
        await cluster.close()


def named(shards: list[Deployment]) -> list[Shard]:
    return [Shard(each.gateway.gateway.address, name) for name, each in zip("ab", shards, strict=True)]


def hold(shards: list[Deployment], at: int | None) -> None:
    for each in shards:
        each.fake.hold_at = at


def keys_of(shards: list[Deployment], number: int) -> set[tuple[str, int]]:
    """Return the samples that a shard gets."""
    assigned = assign([group.prompt_id for group in GROUPS], named(shards))
    prompts = {group.prompt_id for group, index in zip(GROUPS, assigned, strict=True) if index == number}
    return {key for key in KEYS if key[0] in prompts}


async def read_until(rollout: paceline.AsyncRollout, keys: set[tuple[str, int]]) -> list[paceline.Sample]:
    """Read until these samples are there."""
    samples, missing = list[paceline.Sample](), set(keys)
    async with asyncio.timeout(CALL), aclosing(aiter(rollout)) as reading:
        async for sample in reading:
            samples.append(sample)
            missing.discard((sample.prompt_id, sample.slot))
            if not missing:
                return samples
    return samples


async def test_a_batch_over_two_shards_has_the_samples_of_one(shards: list[Deployment]) -> None:
    async with AsyncClient(named(shards), retry=RETRY) as client, client.run("run", seed=SEED) as run:
        rollout = await run.rollout(STEP, GROUPS, SAMPLING)
        assert (len(rollout), rollout.submitted.already_submitted) == (len(KEYS), False)
        assert tokens([sample async for sample in rollout]) == expected()
        assert rollout.complete
        rewards = [Reward(prompt, slot, 1.0) for prompt, slot in KEYS]
        assert await run.report_rewards(rollout.batch.batch_id, rewards, kl=0.1) == len(KEYS)
        again = await client.run("run", seed=SEED).rollout(STEP, GROUPS, SAMPLING)
        assert again.submitted.already_submitted
        assert await client.run("run").report_rewards(rollout.batch.batch_id, rewards) == len(KEYS)
        assert await rollout.ack() == len(KEYS)
    first, second = (each.prompts() for each in shards)
    assert first
    assert second
    assert not first & second, "a group is on one shard"
    async with AsyncClient([named(shards)[0]], retry=RETRY) as client:
        whole = await client.run("alone", seed=SEED).rollout(STEP, GROUPS, SAMPLING)
        assert tokens([sample async for sample in whole]) == expected()


async def test_the_blocking_client_reads_both_shards_at_once(shards: list[Deployment]) -> None:
    # All that b has is read while a holds its samples back.
    shards[0].fake.hold_at = 1

    def read() -> list[paceline.Sample]:
        with Client(named(shards), retry=RETRY) as client:
            rollout = client.run("run", seed=SEED).rollout(STEP, GROUPS, SAMPLING)
            samples, missing = list[paceline.Sample](), keys_of(shards, 1)
            for sample in rollout:
                samples.append(sample)
                missing.discard((sample.prompt_id, sample.slot))
                if not missing:
                    break
            assert not rollout.complete
            shards[0].fake.hold_at = None
            return [*samples, *rollout]

    assert tokens(await asyncio.wait_for(asyncio.to_thread(read), CALL)) == expected()


async def test_a_prompt_stays_on_its_shard_in_the_next_step(shards: list[Deployment]) -> None:
    async with AsyncClient(named(shards), retry=RETRY) as client, client.run("run", seed=SEED) as run:
        for step in (0, 1):
            assert await run.hint(step, GROUPS, SAMPLING, policy_version=0) == len(KEYS)
            assert len([sample async for sample in await run.rollout(step, GROUPS[::-1], SAMPLING)])
    first, second = (each.prompts() for each in shards)
    assert not first & second


async def test_what_was_left_in_the_middle_is_given_once(shards: list[Deployment]) -> None:
    async with AsyncClient(named(shards), retry=RETRY) as client:
        rollout = await client.run("run", seed=SEED).rollout(STEP, GROUPS, SAMPLING)
        samples = list[paceline.Sample]()
        while not rollout.complete:
            async for sample in rollout:
                samples.append(sample)
                if len(samples) % 7 == 0:
                    break
        assert tokens(samples) == expected()


async def test_a_gateway_that_is_replaced_in_mid_batch_goes_unseen(shards: list[Deployment]) -> None:
    hold(shards, 4)
    async with AsyncClient(named(shards), retry=RETRY) as client:
        rollout = await client.run("run", seed=SEED).rollout(STEP, GROUPS, SAMPLING)

        async def read() -> list[paceline.Sample]:
            return [sample async for sample in rollout]

        reading = asyncio.create_task(read())
        await until(lambda: all(each.fake.running() for each in shards), "samples are held back")
        await shards[1].restart()
        hold(shards, None)
        assert tokens(await asyncio.wait_for(reading, CALL)) == expected()


@pytest.mark.parametrize("blocking", [False, True], ids=["aio", "blocking"])
async def test_the_error_of_a_shard_has_its_name_and_the_batch_can_be_read_on(
    shards: list[Deployment], blocking: bool
) -> None:
    hold(shards, 4)
    read = _read_blocking if blocking else _read
    reading = asyncio.create_task(read(shards))
    await until(lambda: all(each.fake.running() for each in shards), "samples are held back")
    await shards[1].gateway.kill()
    samples, error = await asyncio.wait_for(reading, CALL)
    assert error.shard == "b"
    assert "(shard b)" in str(error)
    assert set(tokens(samples)) < set(expected())
    await shards[1].restart()
    hold(shards, None)
    # A trainer that begins again finds what there is on the shard that lived on.
    async with AsyncClient(named(shards), retry=RETRY) as client:
        rollout = await client.run("run", seed=SEED).rollout(STEP, GROUPS, SAMPLING)
        assert rollout.submitted.already_submitted
        assert tokens([sample async for sample in rollout]) == expected()


async def _read(shards: list[Deployment]) -> tuple[list[paceline.Sample], paceline.UnavailableError]:
    samples = list[paceline.Sample]()
    async with AsyncClient(named(shards), retry=IMPATIENT) as client:
        rollout = await client.run("run", seed=SEED).rollout(STEP, GROUPS, SAMPLING)
        try:
            async for sample in rollout:
                samples.append(sample)
        except paceline.UnavailableError as error:
            return samples, error
    pytest.fail("no error was raised")


async def _read_blocking(shards: list[Deployment]) -> tuple[list[paceline.Sample], paceline.UnavailableError]:
    def read() -> tuple[list[paceline.Sample], paceline.UnavailableError]:
        samples = list[paceline.Sample]()
        with Client(named(shards), retry=IMPATIENT) as client:
            rollout = client.run("run", seed=SEED).rollout(STEP, GROUPS, SAMPLING)
            try:
                for sample in rollout:
                    samples.append(sample)
            except paceline.UnavailableError as error:
                return samples, error
        pytest.fail("no error was raised")

    return await asyncio.to_thread(read)


async def test_a_batch_that_one_shard_does_not_take_is_an_error_with_its_name(
    shards: list[Deployment],
) -> None:
    await shards[1].gateway.kill()
    async with AsyncClient(named(shards), retry=IMPATIENT) as client:
        with pytest.raises(paceline.UnavailableError) as raised:
            await client.run("run", seed=SEED).rollout(STEP, GROUPS, SAMPLING, policy_version=0)
        assert raised.value.shard == "b"


async def test_a_batch_is_cancelled_on_all_shards(shards: list[Deployment]) -> None:
    hold(shards, 4)
    async with AsyncClient(named(shards), retry=RETRY) as client:
        rollout = await client.run("run", seed=SEED).rollout(STEP, GROUPS, SAMPLING)
        early = {key for key, found in expected().items() if len(found) <= 4}
        samples = await read_until(rollout, early)
        assert await rollout.cancel(keep_partial=True) == len(KEYS) - len(early)
        samples += [sample async for sample in rollout]
        aborted = {each.key for each in samples if each.status is SampleStatus.ABORTED}
        assert len(aborted) == len(KEYS) - len(early)
        assert len(samples) == len(KEYS)


async def test_shards_that_serve_different_versions_are_no_fleet(shards: list[Deployment]) -> None:
    update = await shards[1].gateway.trainer.weights.StartUpdate(
        weight_pb2.StartUpdateRequest(
            run_id="run",
            policy_version=1,
            target=weight_pb2.WEIGHT_TARGET_POLICY,
            transport=weight_pb2.WEIGHT_TRANSPORT_DISK,
        ),
        timeout=CALL,
    )
    async with AsyncClient(named(shards), retry=RETRY) as client:
        other = client.shard("b")
        await other.update_weights(update.update_id, "/weights/1")
        await other.finish_update(update.update_id)
        with pytest.raises(paceline.FailedPreconditionError) as raised:
            await client.run("run").rollout(STEP, GROUPS, SAMPLING)
        assert raised.value.reason == SHARDS_DIFFER
        assert raised.value.metadata == {"a": "0", "b": "1"}


async def test_a_call_of_one_deployment_has_to_name_it(shards: list[Deployment]) -> None:
    async with AsyncClient(named(shards), retry=RETRY) as client:
        with pytest.raises(paceline.FailedPreconditionError, match="a, b") as raised:
            await client.instances()
        assert raised.value.reason == SHARD_NOT_NAMED
        assert [each.instance_id for each in await client.shard("b").instances()] == ["i0"]
        with pytest.raises(ValueError, match="no shard 'c'"):
            client.shard("c")


def served(shards: list[Deployment]) -> list[int]:
    return [each.fake.version for each in shards]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


@pytest.mark.parametrize("blocking", [False, True], ids=["aio", "blocking"])
async def test_a_version_is_staged_on_all_shards_before_any_applies_it(
    shards: list[Deployment], folder: Path, blocking: bool
) -> None:
    def push() -> paceline.UpdateFinished:
        with Client(named(shards), retry=RETRY) as client:
            return client.run("run").push_weights(folder)

    async def push_aio() -> paceline.UpdateFinished:
        async with AsyncClient(named(shards), retry=RETRY) as client:
            return await client.run("run").push_weights(folder)

    shards[1].fake.stage_gate.clear()
    pushing = asyncio.create_task(asyncio.to_thread(push) if blocking else push_aio())
    await until(lambda: shards[0].fake.staged is not None, "a has the weights")
    book = shards[0].gateway.gateway.leadership.leading().book
    await until(lambda: book.active is not None and book.active.phase is UpdatePhase.STAGED, "a is staged")
    assert served(shards) == [0, 0]
    shards[1].fake.stage_gate.set()
    finished = await asyncio.wait_for(pushing, CALL)
    assert (finished.policy_version, [each.applied for each in finished.instances]) == (1, [True, True])
    assert served(shards) == [1, 1]
    async with AsyncClient(named(shards), retry=RETRY) as client:
        rollout = await client.run("run", seed=SEED).rollout(STEP, GROUPS, SAMPLING)
        assert {sample.version_spans[0].policy_version async for sample in rollout} == {1}


async def test_a_version_that_one_shard_cannot_stage_is_applied_on_none_and_can_be_pushed_again(
    shards: list[Deployment], folder: Path
) -> None:
    shards[1].fake.fail_stage = DataLoss("the checksum is another")
    async with AsyncClient(named(shards), retry=RETRY) as client:
        run = client.run("run")
        with pytest.raises(paceline.PacelineError) as raised:
            await run.push_weights(folder)
        assert (raised.value.shard, raised.value.served) == ("b", {"a": 0, "b": 0})
        assert "served: a 0, b 0" in str(raised.value)
        assert served(shards) == [0, 0]
        assert [(await client.shard(name).versions()).update_id for name in "ab"] == ["", ""]
        shards[1].fake.fail_stage = None
        await until(lambda: len(shards[1].gateway.links()) == 1, "b serves again")
        assert (await run.push_weights(folder)).policy_version == 1
    assert served(shards) == [1, 1]


async def test_a_shard_that_does_not_apply_is_named_and_the_next_push_brings_all_together(
    shards: list[Deployment], folder: Path
) -> None:
    async with AsyncClient(named(shards), retry=RETRY) as client:
        hold(shards[1:], 4)
        run = client.run("run", seed=SEED)
        rollout = await run.rollout(STEP, GROUPS, SAMPLING)
        samples = await read_until(rollout, keys_of(shards, 0))
        with pytest.raises(paceline.FailedPreconditionError) as raised:
            await run.push_weights(folder)
        assert (raised.value.reason, raised.value.shard) == ("SAMPLES_UNFINISHED", "b")
        assert raised.value.served == {"a": 1, "b": 0}
        assert served(shards) == [1, 0]
        # A trainer that starts again knows nothing of the weights that are staged on b.
        again = client.run("run", seed=SEED)
        assert (await again.push_weights(folder, in_flight=InFlight.ABORT)).policy_version == 2
        assert served(shards) == [2, 2]
        samples += [sample async for sample in rollout]
        assert len(samples) == len(KEYS)


async def test_weights_that_wait_for_the_samples_of_one_shard_are_finished_there(
    shards: list[Deployment], folder: Path
) -> None:
    async with AsyncClient(named(shards), retry=RETRY) as client:
        hold(shards[1:], 4)
        run = client.run("run", seed=SEED)
        rollout = await run.rollout(STEP, GROUPS, SAMPLING)
        samples = await read_until(rollout, keys_of(shards, 0))
        with pytest.raises(paceline.FailedPreconditionError):
            await run.push_weights(folder)
        hold(shards, None)
        assert tokens([*samples, *[sample async for sample in rollout]]) == expected()
        finished = await run.finish_push()
        assert (finished.policy_version, len(finished.instances)) == (1, 2)
    assert served(shards) == [1, 1]
    assert [each.fake.applied for each in shards] == [[1], [1]]


@pytest.mark.parametrize("has_them", [True, False])
async def test_what_was_staged_on_a_shard_outlives_its_gateway_or_is_staged_again(
    has_them: bool, shards: list[Deployment], folder: Path
) -> None:
    shards[0].fake.stage_gate.clear()
    async with AsyncClient(named(shards), retry=RETRY) as client:
        pushing = asyncio.create_task(client.run("run").push_weights(folder))
        book = shards[1].gateway.gateway.leadership.leading().book
        await until(
            lambda: book.active is not None and book.active.phase is UpdatePhase.STAGED, "b is staged"
        )
        if not has_them:
            shards[1].fake.staged = None
        await shards[1].restart()
        shards[0].fake.stage_gate.set()
        assert (await asyncio.wait_for(pushing, CALL)).policy_version == 1
    assert served(shards) == [1, 1]


async def test_a_shard_that_loses_what_was_staged_is_named_and_pushing_again_brings_all_together(
    shards: list[Deployment], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged, stage = asyncio.Event(), WeightUpdateCalls._stage

    async def told(calls: WeightUpdateCalls, request: Any) -> Any:
        found = await stage(calls, request)
        staged.set()
        return found

    monkeypatch.setattr(WeightUpdateCalls, "_stage", told)
    shards[0].fake.stage_gate.clear()
    async with AsyncClient(named(shards), retry=IMPATIENT) as client:
        run = client.run("run")
        pushing = asyncio.create_task(run.push_weights(folder))
        # The client knows that b has them: it would ask again otherwise, and be refused before a applies its own.
        await asyncio.wait_for(staged.wait(), CALL)
        shards[1].fake.staged = None
        shards[1].fake.fail_stage = InvalidArgument([])
        await shards[1].restart()
        shards[0].fake.stage_gate.set()
        with pytest.raises(paceline.PacelineError) as raised:
            await asyncio.wait_for(pushing, CALL)
        shards[1].fake.fail_stage = None
        assert (raised.value.shard, raised.value.served) == ("b", {"a": 1, "b": 0})
        with pytest.raises(paceline.FailedPreconditionError, match="push weights again"):
            await run.rollout(STEP, GROUPS, SAMPLING)
        assert (await run.push_weights(folder)).policy_version == 2
    assert served(shards) == [2, 2]


async def test_a_shard_that_another_run_updates_refuses_and_the_others_are_left_free(
    shards: list[Deployment], folder: Path
) -> None:
    async with AsyncClient(named(shards), retry=RETRY) as client:
        other = await client.shard("a").start_update("other", 7)
        with pytest.raises(paceline.FailedPreconditionError) as raised:
            await client.run("run").push_weights(folder)
        assert (raised.value.reason, raised.value.shard) == ("UPDATE_IN_PROGRESS", "a")
        found = [(await client.shard(name).versions()).update_id for name in "ab"]
        assert found == [other.update_id, ""]
        await client.shard("a").abort_update(other.update_id)
        assert (await client.run("run").push_weights(folder)).policy_version == 1
