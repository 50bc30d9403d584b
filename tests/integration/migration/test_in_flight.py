"""New weights while a sample moves with its KV: it goes on from its tokens, each of which is of one version."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import weight_pb2
from tests.integration.migration.conftest import apply_weights, asked, stage_weights
from tests.support.instances import generate
from tests.support.models import tiny_model
from tests.support.moving import Journey, Movers, outcome, reason
from tests.support.relay import Relay, Trouble, relaying

LENGTH = 240
MOVED, *STAYING = HANDLES = range(1, 5)
ATTEMPTS = 20
# Each test has prompts of its own: what an instance knows of one it drafts, and the sample ends at once.
_prompts = itertools.count(1000)


@pytest.fixture
async def other(movers: Movers, model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Path]:
    """Another policy of the same shape. The instances serve their first one again afterwards."""
    yield tiny_model(tmp_path_factory.mktemp("other"), seed=1, max_position_embeddings=1024)
    movers.version += 1
    for place in (0, 1):
        await stage_weights(movers, place, movers.version, model)
        await apply_weights(movers, place, movers.version)


@pytest.fixture
async def relay(movers: Movers) -> AsyncIterator[Relay]:
    """What lies between the first and the second."""
    async with relaying(movers.addresses[1]) as made:
        movers.aliases[made.address] = 1
        yield made


async def started(movers: Movers) -> list[pb.WorkItem]:
    """Samples that are half done at the first instance, which is paused."""
    for _ in range(ATTEMPTS):
        items = []
        for handle in HANDLES:
            items.append(asked(next(_prompts), policy_version=movers.version, max_tokens=LENGTH))
            items[-1].handle = handle
        await movers.start(0, *items)
        await movers.tokens(40, *HANDLES)
        await movers.pause(0)
        if len((await movers.samples(0)).samples) == len(HANDLES):
            return items
        await movers.resume_engine(0)
        await movers.ended(*HANDLES)
    pytest.fail(f"samples of {LENGTH} tokens always ended before their engine could be paused")


async def go_on(movers: Movers, handle: int, place: int) -> None:
    """Go on with a sample that was handed back, as a gateway does."""
    journey = (await movers.ended(handle))[handle]
    assert journey.refused is not None or reason(journey) == "ABORTED"
    journey.item.policy_version = movers.version
    await movers.resume(handle, place)


def check(journey: Journey, old: list[int], new: int) -> int:
    """Check that a sample is of the old policy, and then of the new version; return its tokens of the old one."""
    cut = journey.versions.count(new - 1)
    assert 40 <= cut < LENGTH
    assert journey.versions == [new - 1] * cut + [new] * (LENGTH - cut)
    assert journey.tokens[:cut] == old[:cut]
    assert journey.tokens[cut:] != old[cut:]
    assert reason(journey) == "LENGTH"
    return cut


@pytest.mark.parametrize(
    ("moment", "first"),
    [("on_reserved", 0), ("on_commit", 0), ("on_commit", 1), ("on_committed", 1), ("unclaimed", 1)],
)
async def test_a_sample_that_is_moved_goes_on_under_new_weights(
    movers: Movers, relay: Relay, other: Path, moment: str, first: int
) -> None:
    items = await started(movers)
    old = await generate(movers.addresses[1], items)
    version = movers.version + 1
    for place in (0, 1):
        await stage_weights(movers, place, version, other)

    async def apply() -> dict[int, int]:
        goes_on = weight_pb2.IN_FLIGHT_CONTINUE
        return {place: await apply_weights(movers, place, version, goes_on) for place in (first, 1 - first)}

    applying: list[asyncio.Task[dict[int, int]]] = []

    async def hook() -> None:
        # The donor cancels the call, and with it what the call waits for.
        applying.append(asyncio.create_task(apply()))
        await asyncio.shield(applying[0])

    if moment == "unclaimed":
        movers.claims = False
        assert outcome(await movers.move(MOVED, 1, receiver_address=relay.address)) == ("MOVED", "")
        await hook()
        await movers.claim(MOVED)
    else:
        relay.trouble = Trouble(**{moment: hook})
        assert outcome(await movers.move(MOVED, 1, receiver_address=relay.address))[0] == "FAILED"
    # The sample that moves goes on nowhere by itself, and so in no two places.
    assert await applying[0] == {0: len(STAYING), 1: 0}
    movers.version = version
    await go_on(movers, MOVED, 1)
    await movers.resume_engine(0)
    journeys = await movers.ended(*HANDLES)
    assert [journeys[handle].place for handle in HANDLES] == [1, *[0] * len(STAYING)]
    cuts = {handle: check(journeys[handle], old[handle].tokens, version) for handle in HANDLES}
    for item in items:
        item.policy_version = version
        item.prefix_token_ids[:] = journeys[item.handle].tokens[: cuts[item.handle]]
    # Where the others are that had the old weights' KV of these prefixes.
    for address, group in ((movers.addresses[0], items[:1]), (movers.addresses[1], items[1:])):
        for handle, new in (await generate(address, group)).items():
            assert journeys[handle].tokens[cuts[handle] :] == new.tokens
