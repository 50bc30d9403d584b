"""Moves by prefix between scripted instances: the donor lets go at once, and says where it is to go on."""

from __future__ import annotations

import pytest

from paceline.internal.v1 import migration_pb2 as pb
from paceline.times import seconds_of
from tests.support.moving import Movers, outcome, reason
from tests.unit.migration.conftest import asked, check, claimed, hurry
from tests.unit.migration.scripted_kv import ScriptedInstance

BY_PREFIX = pb.MOVE_BY_PREFIX


async def test_the_sample_ends_here_and_goes_on_there(movers: Movers, places: list[ScriptedInstance]) -> None:
    await movers.start(0, asked(1))
    await movers.tokens(100, 1)
    report = await movers.move(1, 1, by=BY_PREFIX)
    assert outcome(report) == ("MOVED", "")
    assert (report.by, report.copied_bytes, report.delta_bytes, seconds_of(report.stall_time)) == (
        BY_PREFIX,
        0,
        0,
        0,
    )
    journey = (await movers.ended(1))[1]
    assert reason(journey) == "ABORTED"
    assert journey.finished is not None
    assert journey.finished.resume_on == "1"
    assert len(journey.tokens) == report.response_tokens >= 100
    assert journey.finished.decode_steps == len(journey.tokens)
    await movers.resume(1, 1)
    check((await hurry(movers, 1))[1])
    assert places[0].value("moves_total", outcome="handed_on", reason="") == 1
    assert places[0].value("moves_total", outcome="moved", reason="") == 0
    assert places[0].value("stall_steps_count") == 0
    assert places[1].value("arrivals_total", state="claimed") == 0


async def test_other_ends_name_no_instance(movers: Movers) -> None:
    await movers.start(0, asked(1, max_tokens=30))
    finished = (await movers.ended(1))[1].finished
    assert finished is not None
    assert finished.resume_on == ""


async def test_one_that_was_moved_with_its_kv_can_go_on_by_its_prefix(movers: Movers) -> None:
    await movers.start(0, asked(1))
    await movers.tokens(50, 1)
    report = await movers.move(1, 1)
    assert (outcome(report), report.by) == (("MOVED", ""), pb.MOVE_BY_KV)
    await claimed(movers, 1)
    assert outcome(await movers.move(1, 0, by=BY_PREFIX)) == ("MOVED", "")
    await movers.ended(1)
    await movers.resume(1, 0)
    check((await hurry(movers, 1))[1])


@pytest.mark.parametrize("key", ["nobody", ""])
async def test_an_unknown_sample_is_refused(movers: Movers, key: str) -> None:
    report = await movers.move_key(0, key, 1, by=BY_PREFIX)
    assert outcome(report) == ("REFUSED", "UNKNOWN_SAMPLE")


async def test_one_that_nobody_has_claimed_yet_stays(movers: Movers) -> None:
    movers.claims = False
    await movers.start(0, asked(1, max_tokens=3000))
    await movers.tokens(20, 1)
    assert outcome(await movers.move(1, 1)) == ("MOVED", "")
    (listed,) = (await movers.samples(1)).samples
    report = await movers.move_key(1, listed.key, 0, by=BY_PREFIX)
    assert outcome(report) == ("REFUSED", "IN_TRANSIT")
    await movers.claim(1)
    await movers.abort_when_here(1)


async def test_the_same_move_is_made_once(movers: Movers) -> None:
    await movers.start(0, asked(1))
    await movers.tokens(20, 1)
    key = await movers.key(1)
    first = await movers.move_key(0, key, 1, by=BY_PREFIX, migration_id="m")
    again = await movers.move_key(0, key, 1, by=BY_PREFIX, migration_id="m")
    assert first == again
    assert outcome(first) == ("MOVED", "")
