"""Many moves at random moments, of samples that were moved before, with every drafter on: no token changes.

MIGRATION_MOVES=500 makes so many moves; the suite is content with fewer.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from typing import Any

import pytest

from paceline.internal.v1 import generation_pb2 as pb
from tests.integration.migration.conftest import LENGTH, asked
from tests.support.instances import InstanceProcess, Outcome, generate
from tests.support.moving import Movers, outcome, reason

MOVES = int(os.environ.get("MIGRATION_MOVES", "120"))
SAMPLES = 12
# Reasons that are no failure: what was asked for came too late, or too early.
TIMELY = {"FINISHED", "UNKNOWN_SAMPLE", "NOT_DECODING", "IN_TRANSIT", "DONOR_BUSY", "NO_SEAT", "OUTGROWN"}
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 40},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"min_tokens": 250, "ignore_eos": False, "stop_token_ids": list(range(1, 100))},
]


def items(movers: Movers, wave: int) -> list[pb.WorkItem]:
    """Samples of every kind, in groups of two that share a prompt."""
    made = []
    for i in range(SAMPLES):
        handle = 1000 * wave + i
        item = asked(handle, policy_version=movers.version, **SAMPLINGS[i % len(SAMPLINGS)])
        item.prompt_token_ids[:] = asked(handle - handle % 2).prompt_token_ids
        made.append(item)
    return made


def with_drafts(
    items: list[pb.WorkItem], stayed: dict[int, Outcome], chosen: random.Random
) -> list[pb.WorkItem]:
    """A third gets its own future as a guess, and another third one that goes wrong in places."""
    for i, item in enumerate(items):
        guess = list(stayed[item.handle].tokens)
        if i % 3 == 1:
            guess = [chosen.randrange(512) if chosen.random() < 0.1 else token for token in guess]
        if i % 3:
            item.given_draft[:] = guess
    return items


async def wander(
    movers: Movers, handle: int, chosen: random.Random, left: list[int], found: Counter[str]
) -> None:
    """Move a sample to and fro until it has ended, or enough moves were made."""
    journey = movers.journeys[handle]
    while not journey.over and left[0] > 0:
        await movers.tokens(len(journey.tokens) + chosen.randrange(1, 40), handle)
        await movers.until(lambda: journey.over or journey.place >= 0)
        if journey.over:
            return
        report = await movers.move(handle, 1 - journey.place)
        result, why = outcome(report)
        if result == "MOVED":
            left[0] -= 1
        else:
            assert why in TIMELY, report
        found[why or result] += 1


async def test_no_token_changes(movers: Movers, pair: tuple[InstanceProcess, InstanceProcess]) -> None:
    chosen = random.Random(7)
    left, found = [MOVES], Counter[str]()
    wave = moved_again = 0
    while left[0] > 0:
        wave += 1
        stayed = await generate(movers.addresses[wave % 2], items(movers, wave))
        again = with_drafts(items(movers, wave), stayed, chosen)
        for i, each in enumerate(again):
            await movers.start(i % 2, each)
        handles = [each.handle for each in again]
        await asyncio.gather(*[wander(movers, handle, chosen, left, found) for handle in handles])
        journeys = await movers.ended(*handles)
        for handle, journey in journeys.items():
            assert journey.tokens == stayed[handle].tokens, f"sample {handle} after {journey.moves} moves"
            assert journey.logprobs == pytest.approx(stayed[handle].logprobs, abs=2e-5)
            assert reason(journey) in ("STOP", "LENGTH")
            assert len(journey.tokens) <= LENGTH
            moved_again += journey.moves > 1
        assert wave < MOVES, f"hardly anything moves: {found}"
    assert moved_again
    counted = [each.metrics() for each in pair]
    moved = sum(each['paceline_migration_moves_total{outcome="moved",reason=""}'] for each in counted)
    claimed = sum(each['paceline_migration_arrivals_total{state="claimed"}'] for each in counted)
    assert moved == claimed >= MOVES
