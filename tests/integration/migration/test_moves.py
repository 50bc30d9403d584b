"""Samples that move are the samples that they would have been."""

from __future__ import annotations

import pytest

from tests.integration.migration.conftest import LENGTH, asked
from tests.support.instances import InstanceProcess, generate
from tests.support.moving import Movers, outcome, reason


async def test_a_moved_sample_goes_on_as_if_it_had_stayed(
    movers: Movers, pair: tuple[InstanceProcess, InstanceProcess]
) -> None:
    stayed = (await generate(movers.addresses[1], [asked(1)]))[1]
    await movers.start(0, asked(1))
    await movers.tokens(40, 1)
    report = await movers.move(1, 1)
    assert outcome(report) == ("MOVED", "")
    journey = (await movers.ended(1))[1]
    assert (journey.moves, journey.place, reason(journey)) == (1, 1, "LENGTH")
    assert journey.tokens == stayed.tokens
    assert journey.logprobs == pytest.approx(stayed.logprobs, abs=1e-5)
    assert journey.finished is not None
    assert journey.finished is not None
    (source,) = journey.finished.draft_sources
    # Counted over both instances.
    assert source.accepted + journey.finished.decode_steps == LENGTH
