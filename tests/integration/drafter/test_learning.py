"""From the feed to instances that draft with what was learned."""

from __future__ import annotations

import grpc
import pytest

from services.contracts.drafter_checkpoint import verify
from services.contracts.learner import FedBatchEnd, FedRewards
from tests.integration.drafter.conftest import World, prompts, step, until
from tests.support.fake_learner import write_drafter


async def test_what_was_learned_is_published_and_loaded(world: World) -> None:
    first, second = await world.instance("i0"), await world.instance("i1")
    learner = await world.learner(weighting="reward")
    await world.feed(step(1))
    await world.publishes(1)
    await until(lambda: first.version == second.version == 1, "both instances have it")
    published = await world.published()
    assert published is not None
    verify(published.path and world.folder / "drafters/checkpoints/drafter-000001", published.sha256)
    # Only what is not held out was learned from, with its rewards, and each once.
    expected = {f"run/step-1/p{prompt[2]}/{slot}" for prompt in prompts(3, held_out=False) for slot in (0, 1)}
    assert sorted(world.learned()) == sorted(expected)
    assert sorted(world.did("updated")[0]["rewards"]) == [0, 0, 0, 1, 1, 1]
    held_out = {f"run/step-1/p{prompt[2]}/{slot}" for prompt in prompts(2, held_out=True) for slot in (0, 1)}
    assert set(world.did("evaluated")[0]["names"]) == held_out
    said = await learner.get()
    assert (said.drafter_version, said.updates, said.samples_used) == (1, 1, 6)
    assert said.candidate_acceptance_length == pytest.approx(1.3)
    assert said.sha256 == published.sha256 == first.status.sha256
    (decision,) = await world.decided("drafter_published")
    assert decision.details["candidate_acceptance_length"] == pytest.approx(1.3)
    assert learner.metric("version") == 1
    assert learner.metric("samples_used_total") == 6


async def test_what_was_used_is_acknowledged_and_gone_and_the_held_out_stay(world: World) -> None:
    learner = await world.learner(weighting="none")
    *samples, rewards = step(1)
    await world.feed(samples)
    await until(lambda: learner.metric("samples_total", reward="neutral") == 10, "all samples are taken in")
    assert not world.did("updated"), "the step may have more samples"
    await world.feed([FedBatchEnd(rewards.batch)])

    async def only_held_out() -> bool:
        # Two prompts of two samples.
        return await world.entries() == await world.unacknowledged() == 4

    await until(only_held_out, "all but the held-out samples is acknowledged, without a reward")
    await world.feed([rewards])
    await until(only_held_out, "rewards that nobody needs are acknowledged")
    assert sorted(world.learned()) == sorted(set(world.learned()))
    assert len(world.learned()) == 6


async def test_no_better_candidate_is_rejected_and_the_old_one_stays(world: World) -> None:
    instance = await world.instance()
    learner = await world.learner()
    await world.feed(step(1))
    await until(lambda: instance.version == 1, "the first is loaded")
    world.tell("worse")
    await world.feed(step(2))
    (decision,) = await world.decided("drafter_rejected")
    assert decision.details["version_in_use"] == 1
    assert "not better" in decision.reason
    assert await world.version() == 1
    assert (await learner.get()).rejected_candidates == 1
    assert instance.loaded == [1]


async def test_a_given_drafter_is_published_at_once_and_is_what_candidates_must_beat(world: World) -> None:
    given = write_drafter(world.folder / "given", 1, 3.0)
    instance = await world.instance()
    await world.learner(checkpoint=given.path)
    await until(lambda: instance.version == 1, "the given one is loaded")
    assert (await world.published()).path == str(given.path)  # type: ignore[union-attr]
    await world.feed(step(1))
    await until(lambda: instance.version == 2, "the better one is loaded")
    (_, better) = await world.decided("drafter_published", 2)
    assert better.details["current_acceptance_length"] == 3.0
    assert better.predicted_gain == pytest.approx(0.1)


async def test_an_instance_that_joins_later_is_brought_to_what_is_published(world: World) -> None:
    await world.learner()
    await world.feed(step(1))
    await world.publishes(1)
    late = await world.instance("late")
    await until(lambda: late.version == 1, "it has it")


async def test_samples_without_rewards_are_learned_from_after_the_wait(world: World) -> None:
    learner = await world.learner(reward_wait_seconds=0.2, weighting="reward")
    await world.feed([each for each in step(1) if not isinstance(each, FedRewards)])
    await until(lambda: len(world.learned()) == 6, "all were learned from")
    assert {reward for each in world.did("updated") for reward in each["rewards"]} == {None}
    await until(lambda: learner.metric("samples_total", reward="neutral") == 10, "all were waited for")


async def test_an_interval_of_three_takes_a_third_of_the_buffer(world: World) -> None:
    learner = await world.learner(interval=3, weighting="reward")
    for number in (1, 2):
        await world.feed(step(number))
    await until(lambda: learner.metric("samples_total", reward="rewarded") == 20, "two steps came")
    assert not world.did("updating")
    await world.feed(step(3))
    await until(lambda: len(world.learned()) == 6, "a third of 18 was learned from")
    await until(lambda: learner.metric("dropped_samples_total", cause="passed_over") == 12, "the rest went")


async def test_samples_that_come_faster_push_out_the_oldest(world: World) -> None:
    learner = await world.learner(buffer_tokens=55, weighting="reward")
    world.tell("hold")
    await world.feed(step(1))
    await until(lambda: world.did("updating"), "the first update is under way")
    for number in (2, 3):
        await world.feed(step(number))
    await until(lambda: learner.metric("samples_total", reward="rewarded") == 30, "two more steps came")
    world.tell("hold", False)
    await until(lambda: len(world.did("updated")) == 2, "the next update is done")
    learned = world.did("updated")[1]["names"]
    assert {name.split("/")[1] for name in learned} == {"step-3"}
    assert learner.metric("dropped_samples_total", cause="surplus") == 12 - len(learned)


async def test_a_failed_update_costs_its_samples_only(world: World) -> None:
    learner = await world.learner()
    world.tell("fail")
    await world.feed(step(1))
    await until(lambda: learner.metric("updates_total", outcome="failed") == 1, "it failed")
    world.tell("fail", False)
    await world.feed(step(2))
    await world.publishes(1)
    assert {name.split("/")[1] for name in world.learned()} == {"step-2"}


async def test_roll_back_on_request(world: World) -> None:
    instance = await world.instance()
    learner = await world.learner()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await learner.roll_back("nothing there")
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    for number in (1, 2):
        await world.feed(step(number))
        await until(lambda number=number: instance.version == number, f"version {number} is loaded")
    assert (await learner.roll_back("looks odd")).drafter_version == 1
    await until(lambda: instance.version == 1, "the one before is loaded")
    assert (await world.published()).rolled_back_from == 2  # type: ignore[union-attr]
    (decision,) = await world.decided("drafter_rolled_back")
    assert decision.reason == "looks odd"
    assert decision.details == {"version": 2, "back_to": 1, "cause": "asked"}
    # The learner goes on from it, rests for an update, and never uses a number twice.
    await until(lambda: world.did("adopt"), "the learner has gone back")
    await world.feed(step(3))
    await until(lambda: len(world.did("updated")) == 3, "it rests")
    await world.feed(step(4))
    await until(lambda: instance.version == 3, "the next is loaded")


async def test_a_frozen_learner_learns_nothing(world: World) -> None:
    given = write_drafter(world.folder / "given", 1, 2.0)
    instance = await world.instance()
    await world.learner(checkpoint=given.path, frozen=True)
    await until(lambda: instance.version == 1, "the given one is loaded")
    await world.feed(step(1))
    assert await world.entries() == 11
    assert not world.did("updating")
