"""Real instances in trouble while a sample moves. Every stage of every trouble is in tests/unit/migration."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.internal.v1 import generation_pb2 as pb
from paceline.times import duration
from tests.integration.migration.conftest import (
    BLOCK,
    apply_weights,
    asked,
    level,
    stage_weights,
    until_empty,
)
from tests.support.instances import InstanceProcess, generate
from tests.support.moving import Movers, moving, outcome, reason
from tests.support.relay import Relay, Trouble, relaying


@pytest.fixture
async def relay(movers: Movers) -> AsyncIterator[Relay]:
    """Trouble on the way from the first to the second."""
    async with relaying(movers.addresses[1]) as made:
        movers.aliases[made.address] = 1
        yield made


# Each test has a prompt of its own: what an instance knows of one it drafts, and the sample ends at once.
_prompts = itertools.count(100)
_ATTEMPTS = 20


async def started(movers: Movers) -> pb.WorkItem:
    """Sample number 1, half done at the first instance, which is paused: it cannot end before it moves."""
    for _ in range(_ATTEMPTS):
        item = asked(next(_prompts), policy_version=movers.version, max_tokens=400)
        item.handle = 1
        await movers.start(0, item)
        # Of fewer, all full blocks are the prompt's.
        await movers.tokens(4 * BLOCK, 1)
        await movers.pause(0)
        # The receiver has all full blocks by then: of a sample without another one no KV would be sent.
        listed = (await movers.samples(0)).samples
        if listed and (listed[0].prompt_tokens + listed[0].response_tokens - 1) % BLOCK:
            return item
        await movers.resume_engine(0)
        await movers.ended(1)
    pytest.fail("no sample of 400 tokens could be paused in the middle of a block")


async def start(movers: Movers) -> list[int]:
    """Start a sample at the first; what becomes of it when nothing happens."""
    item = await started(movers)
    return (await generate(movers.addresses[1], [item]))[1].tokens


async def ends(movers: Movers, stayed: list[int], place: int) -> None:
    if 0 not in movers.gone:
        await movers.resume_engine(0)
    journey = (await movers.ended(1))[1]
    assert (journey.tokens, journey.place, reason(journey)) == (stayed, place, "LENGTH")


TROUBLES: dict[str, tuple[dict[str, Any], str]] = {
    "cut": ({"cut_after": 20_000}, "CONNECTION"),
    # From the first byte on, so that it is the time of the move that is over: a peer is given up later.
    "stalled": ({"stall_after": 0}, "DEADLINE"),
    "broken": ({"break_at": 20_000}, "CHECKSUM"),
    "commit lost": ({"commit": True}, "RECEIVER_LOST"),
}


@pytest.mark.parametrize("kind", TROUBLES)
async def test_the_sample_stays(movers: Movers, relay: Relay, kind: str) -> None:
    trouble, why = TROUBLES[kind]
    stayed = await start(movers)
    relay.trouble = Trouble(**trouble)
    # Only what is to come too late has little time.
    seconds = {"timeout": duration(0.4)} if why == "DEADLINE" else {}
    report = await movers.move(1, 1, receiver_address=relay.address, **seconds)
    assert outcome(report) == ("FAILED", why)
    await ends(movers, stayed, 0)


async def test_a_lost_answer_to_the_commit(movers: Movers, relay: Relay) -> None:
    stayed = await start(movers)
    relay.trouble = Trouble(commit_answer=True)
    assert outcome(await movers.move(1, 1, receiver_address=relay.address)) == ("MOVED", "")
    await ends(movers, stayed, 1)


async def test_an_abort_while_it_is_paused(movers: Movers, relay: Relay) -> None:
    stayed = await start(movers)

    async def abort() -> None:
        await movers.abort(1)
        await movers.ended(1)

    relay.trouble = Trouble(on_commit=abort)
    assert outcome(await movers.move(1, 1, receiver_address=relay.address)) == ("FAILED", "ABORTED")
    journey = movers.journeys[1]
    assert reason(journey) == "ABORTED"
    assert journey.tokens == stayed[: len(journey.tokens)]


async def test_new_weights_at_the_receiver(
    movers: Movers, relay: Relay, pair: tuple[InstanceProcess, InstanceProcess], model: Path
) -> None:
    stayed = await start(movers)
    version = movers.version + 1

    for place in (0, 1):
        await stage_weights(movers, place, version, model)
    refused = []

    async def apply_to_both() -> None:
        # The donor does not let new weights in while it has the sample, paused as it is.
        try:
            await apply_weights(movers, 0, version)
        except grpc.aio.AioRpcError as error:
            refused.append(error.code())
        await apply_weights(movers, 1, version)

    relay.trouble = Trouble(on_commit=apply_to_both)
    report = await movers.move(1, 1, receiver_address=relay.address)
    assert refused == [grpc.StatusCode.FAILED_PRECONDITION]
    assert outcome(report)[0] == "FAILED"
    assert outcome(report)[1] in ("WITHDRAWN", "CONNECTION", "DEADLINE")
    await ends(movers, stayed, 0)
    await apply_weights(movers, 0, version)


async def test_a_receiver_that_is_killed(
    movers: Movers, relay: Relay, pair: tuple[InstanceProcess, InstanceProcess]
) -> None:
    stayed = await start(movers)

    async def kill() -> None:
        await asyncio.to_thread(pair[1].kill)

    relay.trouble = Trouble(on_commit=kill)
    report = await movers.move(1, 1, receiver_address=relay.address)
    assert outcome(report)[0] == "FAILED"
    assert outcome(report)[1] in ("RECEIVER_LOST", "DEADLINE")
    await ends(movers, stayed, 0)


async def test_a_donor_that_is_killed(
    pair: tuple[InstanceProcess, InstanceProcess], model: Path, revived: None
) -> None:
    first, second = pair
    async with moving(first.address, second.address) as movers, relaying(second.address) as relay:
        await level(movers, model)
        item = await started(movers)

        async def kill() -> None:
            await asyncio.to_thread(first.kill)

        # The receiver runs the sample, and nobody will ever claim it.
        relay.trouble = Trouble(on_committed=kill)
        with pytest.raises(grpc.aio.AioRpcError):
            await movers.move(1, 1, receiver_address=relay.address)
        await movers.until(lambda: 0 in movers.gone)
        journey = movers.journeys[1]
        assert not journey.over
        await movers.resume(1, 1)
        stayed = (await generate(second.address, [item]))[1].tokens
        await ends(movers, stayed, 1)
    async with moving(second.address) as alone:
        await until_empty(alone)
