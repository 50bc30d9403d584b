"""A sample that kept its KV over an update: it moves with it, and shares it with no other sample."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest

from paceline.internal.v1 import migration_pb2 as pb
from tests.support.moving import Journey, Movers, outcome
from tests.unit.migration.conftest import asked, check, claimed, hurry
from tests.unit.migration.scripted_kv import VERSION, ScriptedInstance

LONG = 1200


async def kept(movers: Movers, places: list[ScriptedInstance]) -> None:
    """Let a sample at the first place keep its KV over an update of both, and go on."""
    await movers.start(0, asked(1, max_tokens=LONG))
    await movers.tokens(100, 1)
    assert await places[0].apply_weights(VERSION + 1, goes_on=True, keep_kv=True) == 1
    assert await places[1].apply_weights(VERSION + 1) == 0
    await claimed(movers, 1)


def parts(journey: Journey) -> list[tuple[int, bool]]:
    """The versions of the tokens, and whether they are marked, in order."""
    return [each for each, _ in groupby(zip(journey.versions, journey.mixed, strict=True))]


async def test_it_moves_with_its_kv_and_stays_marked(movers: Movers, places: list[ScriptedInstance]) -> None:
    await kept(movers, places)
    # What the receiver has of the same prompt is of the new version alone.
    places[1].engine.migration.shared = list(asked(1).prompt_token_ids)
    report = await movers.move(1, 1)
    assert (outcome(report), report.shared_blocks) == (("MOVED", ""), 0)
    journey = (await hurry(movers, 1))[1]
    check(journey, LONG)
    assert (journey.place, journey.moves) == (1, 1)
    assert parts(journey) == [(VERSION, False), (VERSION + 1, True)]


async def test_a_receiver_of_an_earlier_release_does_not_get_it(
    movers: Movers, places: list[ScriptedInstance], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would not know that its prefix cache must not have this KV."""
    reserve = places[1].migration.arrivals.reserve

    def forgetful(request: pb.ReserveRequest, *args: Any) -> int:
        request.ClearField("mixed_kv")
        return reserve(request, *args)

    monkeypatch.setattr(places[1].migration.arrivals, "reserve", forgetful)
    await kept(movers, places)
    report = await movers.move(1, 1)
    assert outcome(report) == ("FAILED", "GEOMETRY")
    assert "release" in report.message
    journey = (await hurry(movers, 1))[1]
    check(journey, LONG)
    assert (journey.place, journey.moves) == (0, 0)
    assert parts(journey) == [(VERSION, False), (VERSION + 1, True)]


async def test_a_resumed_sample_is_of_the_new_version_alone(
    movers: Movers, places: list[ScriptedInstance]
) -> None:
    """A move by prefix computes its KV again, so that its later tokens have no mark."""
    await kept(movers, places)
    report = await movers.move(1, 1, by=pb.MOVE_BY_PREFIX)
    assert outcome(report) == ("MOVED", "")
    await movers.ended(1)
    movers.journeys[1].item.policy_version = VERSION + 1
    await movers.resume(1, 1)
    journey = (await hurry(movers, 1))[1]
    check(journey, LONG)
    assert parts(journey) == [(VERSION, False), (VERSION + 1, True), (VERSION + 1, False)]


async def test_samples_that_continue_without_their_kv_have_no_mark(
    movers: Movers, places: list[ScriptedInstance]
) -> None:
    await kept(movers, places)
    assert await places[0].apply_weights(VERSION + 2, goes_on=True) == 0
    await claimed(movers, 1)
    journey = (await hurry(movers, 1))[1]
    check(journey, LONG)
    assert parts(journey) == [(VERSION, False), (VERSION + 1, True), (VERSION + 2, False)]
