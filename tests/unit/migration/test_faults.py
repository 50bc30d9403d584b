"""Whatever goes wrong on the way: the sample is whole, it is nobody's twice, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from paceline.internal.v1 import migration_pb2
from paceline.times import duration, seconds_of
from services.contracts.errors import FailedPrecondition
from services.generation.engine.types import Exported
from tests.support.moving import Movers, outcome, reason
from tests.support.relay import Relay, Trouble, relaying
from tests.unit.migration.conftest import WAIT, asked, check, hurry
from tests.unit.migration.scripted_kv import MOST, VERSION, KvEngine, ScriptedInstance

LONG = 1200
# Where the donor is to give up what it hears nothing of.
SHORT_STALL = pytest.mark.parametrize("limits", [{"migration_stall_seconds": 3.0}])


@pytest.fixture
async def relay(movers: Movers) -> AsyncIterator[Relay]:
    """Trouble between the two."""
    async with relaying(movers.addresses[1]) as made:
        movers.aliases[made.address] = 1
        yield made


async def move(movers: Movers, relay: Relay, **fields: float) -> tuple[str, str]:
    """Start a sample and move it through the relay."""
    await movers.start(0, asked(1, max_tokens=LONG))
    await movers.tokens(100, 1)
    return outcome(await movers.move(1, 1, receiver_address=relay.address, **fields))


async def stays(movers: Movers) -> None:
    """The sample ends where it was, whole."""
    journey = (await hurry(movers, 1))[1]
    check(journey, LONG)
    assert (journey.place, journey.moves) == (0, 0)


async def goes(movers: Movers) -> None:
    """It ends at the other, whole."""
    journey = (await hurry(movers, 1))[1]
    check(journey, LONG)
    assert (journey.place, journey.moves) == (1, 1)


# -- the connection and the calls -------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 10, 3000])
async def test_a_connection_that_is_cut(movers: Movers, relay: Relay, after: int) -> None:
    relay.trouble = Trouble(cut_after=after)
    assert await move(movers, relay) == ("FAILED", "CONNECTION")
    await stays(movers)


async def test_a_connection_that_is_cut_in_stage_two(
    movers: Movers, relay: Relay, places: list[ScriptedInstance]
) -> None:
    await movers.start(0, asked(1, max_tokens=LONG))
    # A part of a block is left for stage two.
    await movers.tokens(MOST, 1)
    pause = places[0].engine.migration.pause

    def then_cut(exported: Exported) -> Exported:
        paused = pause(exported)
        relay.trouble.cut_after = relay.sent + 400
        return paused

    places[0].engine.migration.pause = then_cut  # type: ignore[method-assign]
    report = await movers.move(1, 1, receiver_address=relay.address)
    assert outcome(report) == ("FAILED", "CONNECTION")
    assert seconds_of(report.stall_time) > 0
    await stays(movers)


@pytest.mark.parametrize("after", [0, 3000])
async def test_a_connection_that_stalls_costs_the_time_of_the_move(
    movers: Movers, relay: Relay, after: int
) -> None:
    relay.trouble = Trouble(stall_after=after)
    assert await move(movers, relay, timeout=duration(0.3)) == ("FAILED", "DEADLINE")
    await stays(movers)


async def test_kv_that_is_broken_on_the_way(movers: Movers, relay: Relay) -> None:
    relay.trouble = Trouble(break_at=4000)
    assert await move(movers, relay) == ("FAILED", "CHECKSUM")
    await stays(movers)


async def test_a_token_that_is_not_the_receivers(movers: Movers, relay: Relay) -> None:
    relay.trouble = Trouble(wrong_token=True)
    assert await move(movers, relay) == ("FAILED", "CONNECTION")
    await stays(movers)


async def test_a_reserve_that_is_lost(movers: Movers, relay: Relay) -> None:
    relay.trouble = Trouble(reserve=True)
    assert await move(movers, relay) == ("FAILED", "RECEIVER_LOST")
    await stays(movers)


async def test_a_commit_that_is_lost(movers: Movers, relay: Relay) -> None:
    relay.trouble = Trouble(commit=True)
    assert await move(movers, relay) == ("FAILED", "RECEIVER_LOST")
    assert relay.calls[-2:] == ["Commit", "Cancel"]
    await stays(movers)


async def test_an_answer_to_the_commit_that_is_lost(movers: Movers, relay: Relay) -> None:
    relay.trouble = Trouble(commit_answer=True)
    assert await move(movers, relay) == ("MOVED", "")
    assert relay.calls[-2:] == ["Commit", "Cancel"]
    await goes(movers)


@SHORT_STALL
async def test_a_receiver_that_is_not_heard_of_any_more(
    movers: Movers, relay: Relay, places: list[ScriptedInstance]
) -> None:
    # It has the sample, but nobody is told: the donor goes on, and the other copy is given up.
    relay.trouble = Trouble(commit_answer=True, cancel=True)
    assert await move(movers, relay) == ("FAILED", "RECEIVER_LOST")
    assert relay.calls[-1] == "Disown"
    await stays(movers)
    places[1].pass_deadlines()
    async with asyncio.timeout(WAIT):
        while not places[1].value("arrivals_total", state="expired"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@SHORT_STALL
async def test_a_receiver_that_comes_back_gives_up_what_the_donor_disowns(
    movers: Movers, relay: Relay, places: list[ScriptedInstance]
) -> None:
    async def lose_answers() -> None:
        relay.trouble.cancel_answer = True

    relay.trouble = Trouble(commit_answer=True, on_committed=lose_answers)
    assert await move(movers, relay) == ("FAILED", "RECEIVER_LOST")
    assert places[1].value("arrivals_total", state="cancelled") == 1
    await stays(movers)


async def test_a_reservation_that_is_forgotten_is_freed(
    movers: Movers, places: list[ScriptedInstance]
) -> None:
    # A donor that dies after Reserve: no connection, no Cancel.
    await movers.start(0, asked(1, max_tokens=LONG))
    await movers.tokens(20, 1)
    seen = []
    async with relaying(movers.addresses[1]) as relay:
        reserve = relay.receiver.Reserve

        async def kept(request: migration_pb2.ReserveRequest, timeout: float) -> object:  # noqa: ASYNC109
            seen.append(request)
            return await reserve(request, timeout=timeout)

        relay.receiver.Reserve = kept
        relay.trouble = Trouble(cut_after=0)
        await movers.move(1, 1, receiver_address=relay.address)
    request = seen[0]
    request.migration_id = "forgotten"
    request.timeout.CopyFrom(duration(WAIT))
    response = await movers.migration[1].Reserve(request, timeout=WAIT)
    assert response.WhichOneof("result") == "reserved"
    assert (await movers.samples(1)).free_capacity == 15
    places[1].pass_deadlines()
    async with asyncio.timeout(WAIT):
        while (await movers.samples(1)).free_capacity != 16:
            pass
    await stays(movers)


# -- what happens to the sample, or to an instance, meanwhile ---------------------------------------------------

Deed = Callable[[Movers, list[ScriptedInstance]], Awaitable[None]]
STAGES = ["on_reserved", "on_commit", "on_committed"]


async def abort(movers: Movers, places: list[ScriptedInstance]) -> None:
    await movers.abort(1)
    await movers.ended(1)


@pytest.mark.parametrize("stage", STAGES)
async def test_a_sample_that_is_aborted_is_over_and_nowhere_else(
    movers: Movers, relay: Relay, places: list[ScriptedInstance], stage: str
) -> None:
    relay.trouble = Trouble(**{stage: lambda: abort(movers, places)})
    assert await move(movers, relay) == ("FAILED", "ABORTED")
    journey = movers.journeys[1]
    assert (reason(journey), journey.place, journey.moves) == ("ABORTED", 0, 0)
    assert journey.tokens == list(range(len(journey.tokens)))


@pytest.mark.parametrize("stage", STAGES)
async def test_a_caller_that_leaves_takes_its_sample_along(
    movers: Movers, relay: Relay, places: list[ScriptedInstance], stage: str
) -> None:
    async def leave() -> None:
        movers.streams[0].cancel()
        while await places[0].between_steps(lambda: places[0].loop.samples):  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    relay.trouble = Trouble(**{stage: leave})
    assert await move(movers, relay) == ("FAILED", "ABORTED")


async def test_a_sample_that_finishes_meanwhile(
    movers: Movers, relay: Relay, places: list[ScriptedInstance]
) -> None:
    async def finish() -> None:
        await hurry(movers, 1)

    relay.trouble = Trouble(on_reserved=finish)
    await movers.start(0, asked(1, max_tokens=200))
    await movers.tokens(20, 1)
    assert outcome(await movers.move(1, 1, receiver_address=relay.address)) == ("FAILED", "FINISHED")
    check(movers.journeys[1], 200)


async def test_a_sample_that_is_preempted_meanwhile(
    movers: Movers, relay: Relay, places: list[ScriptedInstance]
) -> None:
    engine = places[0].engine.migration

    async def preempt() -> None:
        await places[0].between_steps(lambda: engine.preempt(next(iter(engine.tables))))

    relay.trouble = Trouble(on_reserved=preempt)
    assert (await move(movers, relay))[1] in ("PREEMPTED", "NOT_DECODING")
    await stays(movers)


async def test_a_second_move_that_is_refused_leaves_the_sample_paused(
    movers: Movers, relay: Relay, places: list[ScriptedInstance]
) -> None:
    refused = []

    async def move_again() -> None:
        # The sample is paused, and the receiver is about to run it.
        refused.append(outcome(await movers.move(1, 1)))
        for _ in range(5):
            await places[0].between_steps(lambda: None)

    relay.trouble = Trouble(on_commit=move_again)
    assert await move(movers, relay) == ("MOVED", "")
    assert refused == [("REFUSED", "IN_TRANSIT")]
    await goes(movers)


async def test_a_sample_that_outgrows_its_reservation(movers: Movers, relay: Relay) -> None:
    async def grow() -> None:
        KvEngine.most = 1500
        await movers.tokens(1500, 1)

    relay.trouble = Trouble(on_reserved=grow)
    await movers.start(0, asked(1, max_tokens=2000))
    await movers.tokens(20, 1)
    found = outcome(await movers.move(1, 1, receiver_address=relay.address))
    assert found == ("FAILED", "OUTGROWN")
    check((await hurry(movers, 1))[1], 2000)


@pytest.mark.parametrize("stage", ["on_reserved", "on_commit"])
async def test_new_weights_at_the_receiver_go_first(
    movers: Movers, relay: Relay, places: list[ScriptedInstance], stage: str
) -> None:
    relay.trouble = Trouble(**{stage: lambda: places[1].apply_weights(VERSION + 1)})
    found = await move(movers, relay)
    assert found[0] == "FAILED"
    assert found[1] in ("WITHDRAWN", "CONNECTION")
    await stays(movers)


async def test_new_weights_that_are_applied_while_a_reserve_waits_refuse_it(
    movers: Movers, relay: Relay, places: list[ScriptedInstance], monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = places[1].loop.execute

    async def behind_the_update(function: Callable[[], Any]) -> Any:
        if places[1].loop.policy_version == VERSION:
            await places[1].apply_weights(VERSION + 1)
        return await execute(function)

    monkeypatch.setattr(places[1].loop, "execute", behind_the_update)
    assert (await move(movers, relay))[1] == "VERSION"
    await stays(movers)


async def test_new_weights_at_the_receiver_end_a_sample_that_nobody_has_claimed(
    movers: Movers, relay: Relay, places: list[ScriptedInstance]
) -> None:
    movers.claims = False
    assert await move(movers, relay) == ("MOVED", "")
    await places[1].apply_weights(VERSION + 1)
    await movers.claim(1)
    journey = (await hurry(movers, 1))[1]
    assert journey.refused is not None


@pytest.mark.parametrize("stage", STAGES)
async def test_new_weights_at_the_donor_are_refused_while_it_has_the_sample(
    movers: Movers, relay: Relay, places: list[ScriptedInstance], stage: str
) -> None:
    refused = []

    async def apply() -> None:
        with pytest.raises(FailedPrecondition):
            await places[0].apply_weights(VERSION + 1)
        refused.append(stage)

    relay.trouble = Trouble(**{stage: apply})
    assert await move(movers, relay) == ("MOVED", "")
    assert refused == [stage]
    await goes(movers)


@pytest.mark.parametrize("stage", STAGES)
async def test_new_weights_at_the_donor_that_samples_go_on_under_end_the_move(
    movers: Movers, relay: Relay, places: list[ScriptedInstance], stage: str
) -> None:
    relay.trouble = Trouble(**{stage: lambda: places[0].apply_weights(VERSION + 1, goes_on=True)})
    assert await move(movers, relay) == ("FAILED", "ABORTED")
    journey = (await movers.ended(1))[1]
    assert (reason(journey), journey.place, journey.moves) == ("ABORTED", 0, 0)
    async with asyncio.timeout(WAIT):
        while len(places[1].loop.samples):  # noqa: ASYNC110 (the engine thread sets no event)
            await asyncio.sleep(0.01)
    journey.item.policy_version = VERSION + 1
    await movers.resume(1, 0)
    check((await hurry(movers, 1))[1], LONG)


@pytest.mark.parametrize("stage", ["on_reserved", "on_commit"])
async def test_a_receiver_that_drains_takes_nothing_more(
    movers: Movers, relay: Relay, places: list[ScriptedInstance], stage: str
) -> None:
    async def drain() -> None:
        places[1].instance.closed = "it is draining"

    relay.trouble = Trouble(**{stage: drain})
    assert await move(movers, relay) == ("FAILED", "CLOSED")
    await stays(movers)


@pytest.mark.parametrize(("stage", "who"), [("on_reserved", 0), ("on_reserved", 1), ("on_commit", 1)])
async def test_a_pause_delays_and_loses_nothing(
    movers: Movers, relay: Relay, places: list[ScriptedInstance], stage: str, who: int
) -> None:
    async def pause() -> None:
        await places[who].between_steps(lambda: setattr(places[who].loop, "paused", True))

    relay.trouble = Trouble(**{stage: pause})
    assert await move(movers, relay) == ("MOVED", "")
    await places[who].between_steps(lambda: setattr(places[who].loop, "paused", False))
    await goes(movers)


@pytest.mark.parametrize("stage", STAGES)
async def test_a_receiver_that_is_killed(
    movers: Movers, relay: Relay, places: list[ScriptedInstance], stage: str
) -> None:
    async def kill() -> None:
        await places[1].server.stop(0)
        places[1].engine.migration.own_port().close()
        await places[1].end()
        await asyncio.to_thread(places[1].loop.join, WAIT)

    relay.trouble = Trouble(**{stage: kill, "commit_answer": stage == "on_committed"})
    found = await move(movers, relay)
    assert found[0] == "FAILED"
    assert found[1] in ("CONNECTION", "RECEIVER_LOST", "WITHDRAWN", "DEADLINE", "INTERNAL")
    await stays(movers)


@pytest.mark.parametrize("stage", STAGES)
async def test_an_engine_that_breaks_at_the_donor(
    movers: Movers, relay: Relay, places: list[ScriptedInstance], stage: str
) -> None:
    loop = places[0].loop

    async def break_it() -> None:
        def fault() -> None:
            places[0].engine.fault = RuntimeError("broken")

        await places[0].between_steps(fault)
        await asyncio.to_thread(loop.join, WAIT)

    relay.trouble = Trouble(**{stage: break_it})
    assert await move(movers, relay) == ("FAILED", "ABORTED")
    await movers.until(lambda: 0 in movers.gone)
    # As a gateway would: from what it has, elsewhere.
    await movers.resume(1, 1)
    journey = (await hurry(movers, 1))[1]
    check(journey, LONG)
    assert journey.tokens == list(range(LONG))


async def test_the_next_move_of_a_sample_that_stayed(movers: Movers, relay: Relay) -> None:
    relay.trouble = Trouble(break_at=4000)
    assert await move(movers, relay) == ("FAILED", "CHECKSUM")
    relay.trouble = Trouble()
    assert outcome(await movers.move(1, 1, receiver_address=relay.address)) == ("MOVED", "")
    await goes(movers)
