"""New weights in mid-sample: before the cut the old policy's tokens, after it the new policy's with that prefix."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from paceline.v1 import weight_pb2
from tests.integration.generation.conftest import Policy
from tests.support.instances import Outcome

HANDLES = range(1, 9)
LONG: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}


@pytest.fixture
async def updated(policy: Policy, models: tuple[Path, Path]) -> AsyncIterator[Policy]:
    """The shared instance; it has the first model's weights again afterwards."""
    yield policy
    await policy.update(models[0])


def check(outcome: Outcome, old: Outcome, served: int) -> int:
    """Check that a sample is the old policy's up to the new version; return its tokens of the old one."""
    cut = outcome.versions.count(served)
    assert outcome.versions == [served] * cut + [served + 1] * (LONG["max_tokens"] - cut)
    assert outcome.tokens[:cut] == old.tokens[:cut]
    assert outcome.logprobs[:cut] == pytest.approx(old.logprobs[:cut], abs=1e-4)
    return cut


async def test_samples_keep_their_kv_and_no_other_sample_finds_it(
    updated: Policy, fresh: Policy, models: tuple[Path, Path]
) -> None:
    old = await updated.ask(*[updated.item(handle, **LONG) for handle in HANDLES])
    served = updated.version
    async with updated.midway(HANDLES, **LONG) as (caller,):
        await updated.stage(served + 1, models[1])
        applied = await updated.apply(served + 1, weight_pb2.IN_FLIGHT_KEEP_KV)
        assert (applied.continued_samples, applied.kept_samples) == (len(HANDLES), len(HANDLES))
        # While they are in the engine, too.
        await updated.resume()
        beside = await updated.tokens(HANDLES)
        outcomes = await caller.ended(*HANDLES)
    cuts = {handle: check(outcomes[handle], old[handle], served) for handle in HANDLES}
    for handle, cut in cuts.items():
        assert outcomes[handle].mixed == [False] * cut + [True] * (LONG["max_tokens"] - cut)
    # What samples that compute their KV again are from there on.
    prefixes = {handle: outcomes[handle].tokens[:cut] for handle, cut in cuts.items()}
    resumed, wanted = [
        await each.ask(*[each.item(handle, prefix_token_ids=prefixes[handle], **LONG) for handle in HANDLES])
        for each in (updated, fresh)
    ]
    assert beside == await fresh.tokens(HANDLES)
    for handle, cut in cuts.items():
        assert resumed[handle].tokens == wanted[handle].tokens
        assert not any(resumed[handle].mixed)
        assert outcomes[handle].tokens[cut:] != wanted[handle].tokens


async def test_samples_go_on_under_new_weights_token_for_token(
    updated: Policy, fresh: Policy, models: tuple[Path, Path]
) -> None:
    old = await updated.ask(*[updated.item(handle, **LONG) for handle in HANDLES])
    served = updated.version
    async with updated.midway(HANDLES, **LONG) as (caller,):
        await updated.stage(served + 1, models[1])
        applied = await updated.apply(served + 1, weight_pb2.IN_FLIGHT_CONTINUE)
        assert (applied.continued_samples, updated.version) == (len(HANDLES), served + 1)
        assert applied.dropped_blocks > 0
        await updated.resume()
        outcomes = await caller.ended(*HANDLES)
    cuts = {handle: check(outcomes[handle], old[handle], served) for handle in HANDLES}
    assert all(0 < cut < LONG["max_tokens"] for cut in cuts.values())
    # Another process that has never had other weights than the new ones.
    prefixes = {handle: outcomes[handle].tokens[:cut] for handle, cut in cuts.items()}
    new = await fresh.ask(
        *[fresh.item(handle, prefix_token_ids=prefix, **LONG) for handle, prefix in prefixes.items()]
    )
    for handle, cut in cuts.items():
        assert outcomes[handle].tokens[cut:] == new[handle].tokens
        assert outcomes[handle].logprobs[cut:] == pytest.approx(new[handle].logprobs, abs=1e-4)
        assert outcomes[handle].tokens[cut:] != old[handle].tokens[cut:]
        assert (outcomes[handle].reason, outcomes[handle].finished is not None) == ("LENGTH", True)
    # Nothing of the old weights is left in the prefix cache either.
    whole = await updated.tokens(HANDLES)
    assert whole == await fresh.tokens(HANDLES)
