"""Moves between scripted instances: what travels, who owns a sample, and what is refused."""

from __future__ import annotations

import asyncio
import random
from itertools import count

import grpc
import pytest

from paceline.internal.v1 import generation_pb2, migration_pb2
from paceline.times import seconds_of
from paceline.v1 import sample_pb2
from services.generation.speculation.drafter import DraftContext
from services.generation.speculation.speculation import Speculation
from tests.support.moving import Journey, Movers, moving, outcome
from tests.support.relay import Trouble, relaying
from tests.unit.migration.conftest import (
    LENGTH,
    PROMPT,
    VERSION,
    WAIT,
    asked,
    check,
    claimed,
    hurry,
    is_empty,
)
from tests.unit.migration.scripted_kv import MOST, SIZE, KvEngine, ScriptedInstance, scripted


async def test_a_moved_sample_goes_on_where_it_was(movers: Movers, places: list[ScriptedInstance]) -> None:
    await movers.start(0, asked(1))
    await movers.tokens(MOST, 1)
    report = await movers.move(1, 1)
    assert outcome(report) == ("MOVED", "")
    journey = (await hurry(movers, 1))[1]
    check(journey)
    assert (journey.moves, journey.place) == (1, 1)
    assert report.response_tokens == MOST
    assert report.copied_bytes > 0
    assert report.delta_bytes > 0
    assert seconds_of(report.stall_time) > 0
    parts = sum(map(seconds_of, (report.reserve_time, report.copy_time, report.stall_time)))
    assert seconds_of(report.total_time) >= parts - 0.01
    assert places[0].value("moves_total", outcome="moved", reason="") == 1
    assert places[1].value("arrivals_total", state="claimed") == 1
    assert places[1].value("resume_seconds_count") == 1
    # One step a token, wherever it was.
    assert journey.finished is not None
    assert journey.finished.decode_steps == LENGTH


@pytest.mark.parametrize("by", [migration_pb2.MOVE_BY_KV, migration_pb2.MOVE_BY_PREFIX])
async def test_one_that_reports_in_checkpoints_brings_all_its_tokens_when_it_moves(
    movers: Movers, by: migration_pb2.MoveBy
) -> None:
    await movers.start(0, asked(1, streamed=False))

    async def decoded(place: int, tokens: int) -> None:
        async with asyncio.timeout(WAIT):
            while [each.response_tokens >= tokens for each in (await movers.samples(place)).samples] != [
                True
            ]:
                pass

    await decoded(0, 50)
    report = await movers.move(1, 1, by=by)
    assert outcome(report) == ("MOVED", "")
    journey = movers.journeys[1]
    if by == migration_pb2.MOVE_BY_PREFIX:
        await movers.ended(1)
        assert journey.tokens == list(range(report.response_tokens))
        return
    KvEngine.most = report.response_tokens + 60
    await decoded(1, report.response_tokens + 50)
    # It has been told of where it was moved, and the rest is with the receiver, which reports in checkpoints too.
    assert report.response_tokens <= len(journey.tokens) < LENGTH
    await movers.abort(1)
    await movers.ended(1)
    assert journey.tokens == list(range(len(journey.tokens)))
    assert len(journey.tokens) >= report.response_tokens + 50


async def test_many_samples_move_to_and_fro() -> None:
    chosen = random.Random(1)
    async with scripted(3) as places, moving(*[each.address for each in places]) as movers:

        async def wander(handle: int) -> None:
            journey = movers.journeys[handle]
            while not journey.over:
                awaited = len(journey.tokens) + chosen.randrange(1, 60)
                # No sample gets far ahead of the foremost one that is awaited here, nor stops short of it: a
                # move that takes long leaves a sample at the limit, and all of them may be there at once.
                KvEngine.most = max(KvEngine.most, awaited + 60)
                await movers.tokens(awaited, handle)
                if journey.over or journey.place < 0:
                    continue
                report = await movers.move(handle, chosen.choice([p for p in range(3) if p != journey.place]))
                assert outcome(report) in (
                    ("MOVED", ""),
                    ("FAILED", "FINISHED"),
                    ("REFUSED", "UNKNOWN_SAMPLE"),
                    ("REFUSED", "NOT_DECODING"),
                    ("REFUSED", "DONOR_BUSY"),
                    # It was listed before its claim had arrived.
                    ("REFUSED", "IN_TRANSIT"),
                    # It was far behind the foremost, and ran on.
                    ("FAILED", "OUTGROWN"),
                ), report

        # A busy machine moves a sample less often before it ends: then others come after it.
        async with asyncio.timeout(3 * WAIT):
            for first in count(0, 8):
                handles = range(first, first + 8)
                for handle in handles:
                    draft = list(range(900)) if handle % 2 else []
                    await movers.start(handle % 3, asked(handle, max_tokens=900, reference_token_ids=draft))
                await asyncio.gather(*map(wander, handles))
                for handle in handles:
                    check(movers.journeys[handle], 900)
                if sum(journey.moves for journey in movers.journeys.values()) > 30:
                    break


async def test_what_the_drafters_know_goes_along(movers: Movers, monkeypatch: pytest.MonkeyPatch) -> None:
    # The guess lags three tokens behind from the start: only a realigned drafter is right.
    guess = [7000, 7001, 7002, *range(LENGTH)]
    await movers.start(0, asked(1, reference_token_ids=guess))
    await movers.tokens(60, 1)
    began: list[DraftContext] = []
    begin = Speculation.begin

    def noted(speculation: Speculation, context: DraftContext) -> None:
        began.append(context)
        begin(speculation, context)

    monkeypatch.setattr(Speculation, "begin", noted)
    assert outcome(await movers.move(1, 1)) == ("MOVED", "")
    journey = (await hurry(movers, 1))[1]
    check(journey)
    assert [context.carried.keys() for context in began] == [{"reference"}]
    assert journey.finished is not None
    (source,) = journey.finished.draft_sources
    assert source.drafter == "reference"
    # Counted over both instances; the last step was cut at the length limit.
    assert LENGTH <= source.accepted + journey.finished.decode_steps <= LENGTH + 4


async def test_blocks_that_the_receiver_has_are_not_sent(
    movers: Movers, places: list[ScriptedInstance]
) -> None:
    places[1].engine.migration.shared = list(asked(1).prompt_token_ids)
    await movers.start(0, asked(1))
    await movers.tokens(20, 1)
    report = await movers.move(1, 1)
    assert (outcome(report), report.shared_blocks) == (("MOVED", ""), PROMPT // SIZE)
    check((await hurry(movers, 1))[1])


async def test_tokens_wait_for_the_claim(movers: Movers, places: list[ScriptedInstance]) -> None:
    movers.claims = False
    await movers.start(0, asked(1))
    await movers.tokens(20, 1)
    assert outcome(await movers.move(1, 1)) == ("MOVED", "")
    KvEngine.hurry()
    loop = places[1].loop
    async with asyncio.timeout(WAIT):
        while await places[1].between_steps(lambda: loop.samples.real_count):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    # It has ended before anybody asked for it.
    await movers.claim(1)
    check((await hurry(movers, 1))[1])


async def test_a_sample_that_nobody_claims_is_given_up(
    movers: Movers, places: list[ScriptedInstance]
) -> None:
    movers.claims = False
    await movers.start(0, asked(1, max_tokens=3000))
    await movers.tokens(20, 1)
    report = await movers.move(1, 1)
    places[1].pass_deadlines()
    async with asyncio.timeout(WAIT):
        expired = migration_pb2.MIGRATION_STATE_EXPIRED
        while await state_of(movers, 1, report.migration_id) != expired:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await movers.claim(1)
    journey = (await hurry(movers, 1))[1]
    assert journey.refused is not None
    assert journey.refused.code == grpc.StatusCode.NOT_FOUND.value[0]
    assert places[1].value("arrivals_total", state="expired") == 1
    # As for a lost instance.
    journey.item.sampling.max_tokens = LENGTH
    await movers.resume(1, 0)
    check((await hurry(movers, 1))[1])


async def state_of(movers: Movers, place: int, migration_id: str) -> int:
    request = migration_pb2.GetMigrationRequest(migration_id=migration_id)
    response = await movers.migration[place].GetMigration(request, timeout=WAIT)
    return int(response.migration.state)


async def test_a_claim_of_nothing_and_a_claim_under_a_taken_name(movers: Movers) -> None:
    claim = generation_pb2.Claim(handle=9, migration_id="unknown")
    movers.journeys[9] = Journey(asked(9), 0)
    await movers.streams[0].write(generation_pb2.WorkRequest(claim=[claim]))
    journey = (await movers.ended(9))[9]
    assert journey.refused is not None
    assert journey.refused.code == grpc.StatusCode.NOT_FOUND.value[0]

    movers.claims = False
    await movers.start(0, asked(1))
    await movers.start(1, asked(2, max_tokens=2000))
    # All that they have for now: nothing more is told of the second, whose name the claim of the first takes.
    await movers.tokens(MOST, 1, 2)
    assert outcome(await movers.move(1, 1)) == ("MOVED", "")
    taken = generation_pb2.Claim(handle=2, migration_id=movers.unclaimed[1].migration_id)
    await movers.streams[1].write(generation_pb2.WorkRequest(claim=[taken]))
    await movers.until(lambda: movers.journeys[2].refused)
    assert movers.journeys[2].refused.code == grpc.StatusCode.ALREADY_EXISTS.value[0]  # type: ignore[union-attr]
    movers.journeys[2].refused = None
    await movers.claim(1)
    check((await hurry(movers, 1))[1])


async def test_a_move_is_made_once(movers: Movers) -> None:
    await movers.start(0, asked(1))
    await movers.tokens(20, 1)
    key = await movers.key(1)
    reports = await asyncio.gather(*[movers.move_key(0, key, 1, migration_id="m1") for _ in range(3)])
    assert [outcome(each) for each in reports] == [("MOVED", "")] * 3
    assert (await movers.move_key(0, key, 1, migration_id="m1")).total_time == reports[0].total_time
    check((await hurry(movers, 1))[1])
    assert await state_of(movers, 0, "m1") == migration_pb2.MIGRATION_STATE_COMMITTED
    assert await state_of(movers, 1, "m1") == migration_pb2.MIGRATION_STATE_CLAIMED
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await state_of(movers, 0, "m2")
    # Only the interceptor of a real server makes it NOT_FOUND.
    assert "m2" in str(caught.value.details())


async def test_the_list_says_what_can_be_moved(movers: Movers, places: list[ScriptedInstance]) -> None:
    await movers.start(
        0, asked(1, run_id="run", prompt_id="p", slot=3, step=7, reference_token_ids=list(range(LENGTH)))
    )
    await movers.tokens(30, 1)
    listed = await movers.samples(0)
    (sample,) = listed.samples
    assert (sample.handle, sample.run_id, sample.prompt_id, sample.slot, sample.step) == (1, "run", "p", 3, 7)
    assert (sample.prompt_tokens, sample.max_tokens, sample.migrations) == (PROMPT, LENGTH, 0)
    assert sample.response_tokens >= 30
    assert sample.acceptance == pytest.approx(4, abs=0.5)
    assert sample.immovable == migration_pb2.MOVE_REASON_UNSPECIFIED
    seats = places[0].engine.seats
    assert (listed.block_size, listed.max_running, listed.policy_version) == (SIZE, seats, VERSION)
    assert listed.free_blocks == listed.total_blocks - sample.kv_blocks
    assert listed.free_capacity == seats - 1
    assert outcome(await movers.move(1, 1)) == ("MOVED", "")
    found = (await movers.samples(1)).samples
    assert (found[0].migrations, found[0].acceptance) == (1, pytest.approx(4, abs=0.5))
    check((await hurry(movers, 1))[1])


async def test_what_cannot_be_moved_stays(movers: Movers, places: list[ScriptedInstance]) -> None:
    assert outcome(await movers.move_key(0, "s99", 1)) == ("REFUSED", "UNKNOWN_SAMPLE")
    await movers.start(0, asked(1, max_tokens=3000))
    await movers.tokens(20, 1)
    assert outcome(await movers.move(1, 0)) == ("REFUSED", "SELF")
    assert outcome(await movers.move(1, 1, receiver_address="127.0.0.1:1"))[1] in (
        "RECEIVER_LOST",
        "DEADLINE",
    )
    places[1].instance.closed = "it is draining"
    assert outcome(await movers.move(1, 1)) == ("REFUSED", "CLOSED")
    places[1].instance.closed = ""
    places[1].loop.paused = True
    assert outcome(await movers.move(1, 1)) == ("REFUSED", "CLOSED")
    places[1].loop.paused = False
    places[1].loop.policy_version = VERSION + 1
    assert outcome(await movers.move(1, 1)) == ("REFUSED", "VERSION")
    places[1].loop.policy_version = VERSION
    places[1].engine.seats = 0
    assert outcome(await movers.move(1, 1)) == ("REFUSED", "FULL")
    places[1].engine.seats = 16
    free, places[1].engine.migration.free = places[1].engine.migration.free, []
    assert outcome(await movers.move(1, 1)) == ("REFUSED", "NO_KV")
    places[1].engine.migration.free = free
    assert places[1].value("refusals_total", reason="no_kv") == 1
    # After all that it can still go.
    assert outcome(await movers.move(1, 1)) == ("MOVED", "")
    await movers.abort_when_here(1)


async def test_kv_of_another_shape_is_refused(movers: Movers) -> None:
    async with (
        scripted(1, model="another") as others,
        moving(movers.addresses[0], others[0].address) as caller,
    ):
        await caller.start(0, asked(1))
        await caller.tokens(10, 1)
        report = await caller.move(1, 1)
        assert outcome(report) == ("REFUSED", "GEOMETRY")
        assert "model is 'tiny', here 'another'" in report.message
        check((await hurry(caller, 1))[1])


async def test_a_donor_lets_only_so_many_go_at_once(places: list[ScriptedInstance]) -> None:
    async with (
        scripted(1, migration_outgoing=1) as donors,
        relaying(places[1].address) as relay,
        moving(donors[0].address, places[1].address) as caller,
    ):
        caller.aliases[relay.address] = 1
        refused = []

        async def another() -> None:
            refused.append(outcome(await caller.move(2, 1)))

        relay.trouble = Trouble(on_reserved=another)
        await caller.start(0, asked(1, max_tokens=2000), asked(2, max_tokens=2000))
        await caller.tokens(50, 1, 2)
        assert outcome(await caller.move(1, 1, receiver_address=relay.address)) == ("MOVED", "")
        assert refused == [("REFUSED", "DONOR_BUSY")]


async def test_a_lenient_sample_moves_once_it_takes_nothing_over_any_more(movers: Movers) -> None:
    level = sample_pb2.EXACTNESS_LEVEL_LENIENT
    exactness = sample_pb2.Exactness(level=level, lenience=2.0)
    await movers.start(0, asked(1, exactness=exactness))
    await movers.tokens(20, 1)
    assert outcome(await movers.move(1, 1)) == ("MOVED", "")
    check((await hurry(movers, 1))[1])


async def test_every_rank_sends_its_own_part() -> None:
    async with scripted(2, ranks=2) as places, moving(*[each.address for each in places]) as movers:
        await movers.start(0, asked(1, reference_token_ids=list(range(LENGTH))), asked(2, max_tokens=1200))
        await movers.tokens(60, 1, 2)
        reports = [await movers.move(handle, 1) for handle in (2, 1)]
        assert [outcome(each) for each in reports] == [("MOVED", "")] * 2
        # Both ranks together.
        block = places[0].migration._donor.geometry.block_bytes  # type: ignore[union-attr]
        assert reports[0].copied_bytes % (2 * block) == 0
        assert reports[0].copied_bytes > 0
        await claimed(movers, 2)
        assert outcome(await movers.move(2, 0)) == ("MOVED", "")
        journeys = await hurry(movers, 1, 2)
        check(journeys[1])
        check(journeys[2], 1200)
    assert all(is_empty(each) for each in places)


async def test_ranks_of_another_number_do_not_match() -> None:
    async with (
        scripted(1) as one,
        scripted(1, ranks=2) as two,
        moving(one[0].address, two[0].address) as movers,
    ):
        await movers.start(0, asked(1, max_tokens=1200))
        await movers.tokens(20, 1)
        assert outcome(await movers.move(1, 1)) == ("REFUSED", "GEOMETRY")
        check((await hurry(movers, 1))[1], 1200)
