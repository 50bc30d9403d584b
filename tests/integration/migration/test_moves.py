"""Samples that move are the samples that they would have been."""

from __future__ import annotations

import pytest

from tests.integration.migration.conftest import LENGTH, asked
from tests.support.instances import InstanceProcess, generate
from tests.support.moving import Movers, outcome, reason


async def test_a_moved_sample_goes_on_as_if_it_had_stayed(
    movers: Movers, pair: tuple[InstanceProcess, InstanceProcess]
) -> None:
    length = 3 * LENGTH
    for handle in range(1, 20):
        await movers.start(0, asked(handle, max_tokens=length, policy_version=movers.version))
        await movers.tokens(40, handle)
        if outcome(await movers.move(handle, 1)) == ("MOVED", ""):
            break
        # On a busy machine a sample may have ended before its move begins.
        assert reason((await movers.ended(handle))[handle]) == "LENGTH"
    else:
        raise AssertionError("no sample was moved")
    stayed = (
        await generate(movers.addresses[1], [asked(handle, max_tokens=length, policy_version=movers.version)])
    )[handle]
    journey = (await movers.ended(handle))[handle]
    assert (journey.moves, journey.place, reason(journey)) == (1, 1, "LENGTH")
    assert journey.tokens == stayed.tokens
    assert journey.logprobs == pytest.approx(stayed.logprobs, abs=1e-5)
    assert journey.finished is not None
    # Counted over both instances; where drafts do not pay there are none.
    accepted = sum(source.accepted for source in journey.finished.draft_sources)
    assert accepted + journey.finished.decode_steps == length
