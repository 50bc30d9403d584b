"""Instance with the quantized copy: a flag, results and metrics, and its renewal with new weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.generation.conftest import ATTEMPTS, Policy
from tests.support.instances import InstanceProcess, Outcome, stub_of
from tests.support.models import tiny_model

pytestmark = pytest.mark.timeout(300)
_HANDLES = (1, 2, 3, 4)


def accepted_from_copy(outcome: Outcome) -> int:
    """Return how many of a sample's tokens were drafted by the quantized copy."""
    assert outcome.finished is not None
    return sum(each.accepted for each in outcome.finished.draft_sources if each.drafter == "quantized")


async def test_an_instance_drafts_with_the_quantized_copy_of_its_weights(
    redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder: Path = tmp_path_factory.mktemp("w4-instance")
    first, second = tiny_model(folder / "first", seed=0), tiny_model(folder / "second", seed=1)
    settings = {"block_size": 32, "namespace": "w4-tests", "speculation": "fixed"}
    # No other drafter is in the way of this one.
    alone = {"drafters": "reference", "drafts": False}
    with InstanceProcess(
        first, redis_url, folder, quantized=True, quantized_group=32, quantized_tokens=4, **settings, **alone
    ) as instance:
        async with stub_of(instance.address) as stub:
            policy = Policy(instance.address, stub)
            await policy.look()
            tokens = {}
            for model in (first, second, first):
                if tokens:
                    await policy.update(model)
                # The copy is made between steps: the first samples may end before it is complete.
                for _ in range(ATTEMPTS):
                    outcomes = await policy.ask(*[policy.item(handle) for handle in _HANDLES])
                    found = {handle: outcome.tokens for handle, outcome in outcomes.items()}
                    # The same weights, the same tokens; another update lies between.
                    assert tokens.setdefault(model, found) == found
                    if accepted := sum(accepted_from_copy(outcome) for outcome in outcomes.values()):
                        break
                assert accepted > 0
            assert tokens[first] != tokens[second]
        metrics = instance.metrics()
    assert metrics['paceline_quantized_refresh_seconds_count{time="work"}'] == 2
    assert metrics["paceline_quantized_memory_bytes"] > 0
    assert (
        metrics["paceline_quantized_draft_tokens_total"] > metrics["paceline_quantized_draft_steps_total"] > 0
    )
    assert not any(name.startswith("paceline_speculation_drafter_faults_total{") for name in metrics)
