"""The learner dies in an update, while it publishes, or before it acknowledges: nothing is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

from services.contracts.drafter_checkpoint import verify
from services.drafter.training.session import LEARNER
from tests.integration.drafter.conftest import World, step, until
from tests.support.fake_learner import log_of, write_drafter


def state_of(world: World) -> list[str]:
    """Names of the samples that are part of the latest state, each as often as it was learned from."""
    states = sorted((world.folder / "drafters/state").glob("state-*"))
    return json.loads((states[-1] / LEARNER).read_text())[1] if states else []


def names(number: int) -> set[str]:
    """Of the samples of a step that are learned from."""
    return {f"run/step-{number}/p{fed.prompt[2]}/{fed.slot}" for fed in step(number, held_out=0)[:-1]}  # type: ignore[union-attr]


async def test_killed_in_an_update_it_learns_from_the_same_samples_again(world: World) -> None:
    instance = await world.instance()
    world.tell("hold")
    process = await world.process()
    await world.feed(step(1))
    await until(lambda: world.did("updating"), "the update is under way")
    process.kill()
    assert await world.entries() == 11
    world.tell("hold", False)
    # The training process of the one that was killed is gone as well: it would go on now.
    await process.start()
    await until(lambda: instance.version == 1, "it is published and loaded")
    await until(lambda: set(state_of(world)) == names(1), "all are part of the state")
    assert len(state_of(world)) == 6
    assert len(world.did("updated")) == 1
    assert process.stop() == 0


async def test_killed_again_and_again_each_sample_is_learned_from_once(world: World) -> None:
    instance = await world.instance()
    process = await world.process(save_every=2)
    fed = 0
    for moment in (0.02, 0.15, 0.4):
        await world.feed(each for number in (fed + 1, fed + 2) for each in step(number))
        fed += 2
        before = len(log_of(world.control))
        await until(lambda before=before: len(log_of(world.control)) > before, "it is at work")
        await asyncio.sleep(moment)
        process.kill()
        version = instance.version
        await process.start()
        assert instance.version >= version
    await world.feed(each for number in (fed + 1, fed + 2) for each in step(number))
    every = set().union(*(names(number) for number in range(1, fed + 3)))
    await until(lambda: set(state_of(world)) == every, "all samples are part of the state")
    assert len(state_of(world)) == len(every), "a sample was learned from twice"

    async def is_in_use() -> bool:
        # The last state may come before the drafter that is made of it.
        return instance.version == await world.version()

    await until(is_in_use, "what is published is in use")
    published = await world.published()
    assert published is not None
    verify(Path(published.path), published.sha256)
    assert instance.loaded == sorted(set(instance.loaded)), "versions only grow, and each is loaded once"
    assert process.stop() == 0


async def test_what_a_learner_wrote_and_did_not_publish_is_nobodys(world: World) -> None:
    checkpoints = world.folder / "drafters/checkpoints"
    orphan = write_drafter(checkpoints, 1, 9.0)
    instance = await world.instance()
    await world.learner()
    assert await world.published() is None
    await world.feed(step(1))
    # Its number is not given out again: an instance may have been told of it.
    await until(lambda: instance.version == 2, "the next number is published and loaded")
    await until(lambda: not orphan.path.exists(), "it is removed")


async def test_used_but_not_acknowledged_is_not_learned_from_again(world: World) -> None:
    learner = await world.learner()
    await world.feed(step(1))
    await world.publishes(1)
    await until(lambda: len(state_of(world)) == 6, "all are part of the state")
    await learner.kill()
    # As if it had died between the state and the acknowledgement.
    used = world.figures()["used"]
    assert len(used) == 6
    await world.redis.delete(world.keys.feed)
    await world.feed(step(1))
    entries = await world.redis.xrange(world.keys.feed)
    ids = [entry_id.decode() for entry_id, _ in entries[:6]]
    manifest = max((world.folder / "drafters/state").glob("state-*/manifest.json"))
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"used": ids}))
    second = await world.learner("drafter-1")
    await world.feed(step(2))
    await until(lambda: len(state_of(world)) == 12, "the next step is learned from")
    assert sorted(state_of(world)) == sorted(names(1) | names(2))
    assert second.metric("samples_used_total") == 6


async def test_the_training_process_dies_and_is_replaced(world: World) -> None:
    learner = await world.learner()
    world.tell("hold")
    await world.feed(step(1))
    await until(lambda: world.did("updating"), "the update is under way")
    os.kill(world.did("begin")[-1]["pid"], signal.SIGKILL)
    world.tell("hold", False)
    await world.publishes(1)
    await until(lambda: sorted(state_of(world)) == sorted(names(1)), "all are part of the state")
    assert learner.metric("trainer_restarts_total") == 1


async def test_samples_that_it_dies_of_are_given_up(world: World) -> None:
    learner = await world.learner()
    world.tell("hold")
    await world.feed(step(1))
    for death in (1, 2):
        await until(lambda death=death: len(world.did("updating")) == death, "the update is under way")
        os.kill(world.did("begin")[-1]["pid"], signal.SIGKILL)
    await until(lambda: learner.metric("dropped_samples_total", cause="failed") == 6, "they are dropped")
    world.tell("hold", False)
    await world.feed(step(2))
    await world.publishes(1)
    await until(lambda: set(state_of(world)) == names(2), "the next step is part of the state")


async def test_a_broken_state_is_passed_over_for_the_one_before(world: World) -> None:
    learner = await world.learner()
    for number in (1, 2):
        await world.feed(step(number))
        await world.publishes(number)

    async def only_held_out() -> bool:
        return await world.unacknowledged() == 8

    await until(only_held_out, "both steps are part of the state, and acknowledged")
    await learner.kill()
    states = world.folder / "drafters/state"
    (max(states.glob("state-*")) / LEARNER).write_text("rubbish")
    await world.learner("drafter-1")
    await world.feed(step(3))
    await until(lambda: list(states.glob("state-00000003-*")), "there is a next state")
    assert set(state_of(world)) == names(1) | names(3), "it went on from the state before"


async def test_a_standby_takes_over(world: World) -> None:
    instance = await world.instance()
    first = await world.learner()
    second = await world.learner("drafter-1", leading=False)
    await world.feed(step(1))
    await until(lambda: instance.version == 1, "the first is loaded")
    await first.kill()
    await until(second.leads, "the standby leads")
    said = await second.get()
    assert said.drafter_version == 1
    await world.feed(step(2))
    await until(lambda: instance.version == 2, "the second is loaded")
    assert (await second.get()).updates == 2
