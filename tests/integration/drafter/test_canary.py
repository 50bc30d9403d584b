"""Published drafters that do not do well: watched on live drafts, refused by instances, and taken back."""

from __future__ import annotations

from tests.integration.drafter.conftest import World, step, until


async def test_a_collapse_on_live_traffic_rolls_back_by_itself(world: World) -> None:
    first, second = await world.instance("i0"), await world.instance("i1")
    learner = await world.learner()
    await world.feed(step(1))
    await until(lambda: first.version == second.version == 1, "the first is loaded")
    for instance in (first, second):
        instance.draft(100, 4, 280)
    await until(lambda: learner.metric("live_acceptance_length") == 3.8, "its drafts are known")
    await world.feed(step(2))
    await until(lambda: first.version == second.version == 2, "the second is loaded")
    first.draft(10, 4, 2)
    second.draft(30, 4, 6)
    await until(lambda: first.version == second.version == 1, "they went back")
    (decision,) = await world.decided("drafter_rolled_back")
    assert decision.details == {"version": 2, "back_to": 1, "cause": "collapsed"}
    assert "70.0% of the previous version" in decision.reason
    assert learner.metric("rollbacks_total", cause="collapsed") == 1
    assert (await learner.get()).rollbacks == 1
    assert await world.version() == 1


async def test_fewer_accepted_drafts_are_no_collapse(world: World) -> None:
    instance = await world.instance()
    learner = await world.learner(canary_tokens=400)
    await world.feed(step(1))
    await until(lambda: instance.version == 1, "the first is loaded")
    instance.draft(100, 4, 280)
    await until(lambda: learner.metric("live_acceptance_length") == 3.8, "its drafts are known")
    await world.feed(step(2))
    await until(lambda: instance.version == 2, "the second is loaded")
    instance.draft(50, 4, 110)
    await until(lambda: learner.metric("live_acceptance_length") == 3.2, "its drafts are known")
    instance.draft(50, 4, 110)
    # It has passed: what comes later of it is the policy's doing, and going back would be no help.
    await until(
        lambda: learner.process.leadership.leading().publisher._canary is None, "the canary has ended"
    )
    assert not await world.decisions("drafter_rolled_back")


async def test_the_canary_of_a_killed_learner_goes_on(world: World) -> None:
    instance = await world.instance()
    learner = await world.learner()
    await world.feed(step(1))
    await until(lambda: instance.version == 1, "the first is loaded")
    instance.draft(100, 4, 280)
    await until(lambda: learner.metric("live_acceptance_length") == 3.8, "its drafts are known")
    await world.feed(step(2))
    await until(lambda: instance.version == 2, "the second is loaded")
    await learner.kill()
    instance.draft(60, 4, 10)
    await world.learner("drafter-1")
    await until(lambda: instance.version == 1, "it went back")


async def test_a_checkpoint_that_instances_refuse_is_taken_back(world: World) -> None:
    instance = await world.instance()
    learner = await world.learner()
    await world.feed(step(1))
    await until(lambda: instance.version == 1, "the first is loaded")
    instance.refuses = True
    await world.feed(step(2))
    (decision,) = await world.decided("drafter_rolled_back")
    assert decision.details == {"version": 2, "back_to": 1, "cause": "refused"}
    assert await world.version() == 1
    assert instance.loaded == [1]
    assert learner.metric("loads_total", outcome="refused") == 1


async def test_without_one_before_a_collapse_is_said_once(world: World) -> None:
    instance = await world.instance()
    learner = await world.learner()
    await world.feed(step(1))
    await until(lambda: instance.version == 1, "the first is loaded")
    instance.draft(1000, 4, 0)
    (decision,) = await world.decided("drafter_rolled_back")
    assert "there is no earlier drafter" in decision.reason
    await world.feed(step(2))
    await until(lambda: instance.version == 2, "the next is published all the same")
    assert len(await world.decisions("drafter_rolled_back")) == 1
    assert learner.metric("rollbacks_total", cause="collapsed") == 1


async def test_an_instance_that_is_away_is_tried_again(world: World) -> None:
    instance = await world.instance()
    instance.deaf = True
    learner = await world.learner()
    await world.feed(step(1))
    await world.publishes(1)
    await until(lambda: learner.metric("loads_total", outcome="failed") >= 3, "it was tried")
    instance.deaf = False
    await until(lambda: instance.version == 1, "it has it")
    assert not await world.decisions("drafter_rolled_back")
