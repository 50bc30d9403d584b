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

MOVES = int(os.environ.get("MIGRATION_MOVES", "48"))
SAMPLES = 12
WAVES = 3
"""How often the same samples are moved: to have them stay takes as long as to move them."""
# Reasons that are no failure: what was asked for came too late, or too early.
TIMELY = {"FINISHED", "UNKNOWN_SAMPLE", "NOT_DECODING", "IN_TRANSIT", "DONOR_BUSY", "FULL", "OUTGROWN"}
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 40},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"min_tokens": 250, "ignore_eos": False, "stop_token_ids": list(range(1, 100))},
]


def items(movers: Movers, wave: int, first: int) -> list[pb.WorkItem]:
    """Return the samples of the `first` wave for any wave: of every kind, in groups of two that share a prompt."""
    made = []
    for i in range(SAMPLES):
        like = 1000 * first + i
        item = asked(like, policy_version=movers.version, **SAMPLINGS[i % len(SAMPLINGS)])
        item.prompt_token_ids[:] = asked(like - like % 2).prompt_token_ids
        item.handle = 1000 * wave + i
        made.append(item)
    return made


def with_drafts(items: list[pb.WorkItem], stayed: list[Outcome], chosen: random.Random) -> list[pb.WorkItem]:
    """Return a third gets its own future as a guess, and another third one that goes wrong in places."""
    for i, item in enumerate(items):
        guess = list(stayed[i].tokens)
        if i % 3 == 1:
            guess = [chosen.randrange(512) if chosen.random() < 0.1 else token for token in guess]
        if i % 3:
            item.reference_token_ids[:] = guess
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


def counts(pair: tuple[InstanceProcess, InstanceProcess]) -> tuple[float, float]:
    """Return how many samples the instances have moved, and claimed, until now."""
    shown = [each.metrics() for each in pair]
    names = (
        'paceline_migration_moves_total{outcome="moved",reason=""}',
        'paceline_migration_arrivals_total{state="claimed"}',
    )
    moved, claimed = (sum(each.get(name, 0.0) for each in shown) for name in names)
    return moved, claimed


async def test_no_token_changes(movers: Movers, pair: tuple[InstanceProcess, InstanceProcess]) -> None:
    # Samples of other tests are moved and never claimed.
    before, chosen = counts(pair), random.Random(7)
    left, found = [MOVES], Counter[str]()
    wave = moved_again = 0
    while left[0] > 0:
        wave += 1
        if wave % WAVES == 1:
            first = wave
            outcomes = await generate(movers.addresses[wave // WAVES % 2], items(movers, wave, wave))
            stayed = [outcomes[1000 * wave + i] for i in range(SAMPLES)]
        again = with_drafts(items(movers, wave, first), stayed, chosen)
        for i, each in enumerate(again):
            await movers.start(i % 2, each)
        handles = [each.handle for each in again]
        await asyncio.gather(*[wander(movers, handle, chosen, left, found) for handle in handles])
        journeys = await movers.ended(*handles)
        for wanted, (handle, journey) in zip(stayed, journeys.items(), strict=True):
            assert journey.tokens == wanted.tokens, f"sample {handle} after {journey.moves} moves"
            assert journey.logprobs == pytest.approx(wanted.logprobs, abs=2e-5)
            assert reason(journey) in ("STOP", "LENGTH")
            assert len(journey.tokens) <= LENGTH
            moved_again += journey.moves > 1
        assert wave < MOVES, f"hardly anything moves: {found}"
    assert moved_again
    moved, claimed = (now - earlier for now, earlier in zip(counts(pair), before, strict=True))
    assert moved == claimed >= MOVES
