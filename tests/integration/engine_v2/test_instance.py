"""An instance on V2 as a gateway meets it: drafts are decided before the outcome of the last step is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest

from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import sample_pb2
from tests.support.instances import InstanceProcess, Outcome, calling, generate, item
from tests.support.models import VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.timeout(300)

SAMPLES, TOKENS = 8, 40
Instances = tuple[InstanceProcess, InstanceProcess]


@pytest.fixture(scope="module")
def instances(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instances]:
    """One on V1 and one on V2, which drafts from the references of samples."""
    folder = tmp_path_factory.mktemp("instances")
    model = tiny_model(folder / "model")
    common: dict[str, Any] = {
        "namespace": "engine-v2",
        "max_num_seqs": 16,
        "max_model_len": 128,
        "block_size": 32,
        "kv_cache_memory_bytes": 16 << 20,
        "sweep_seconds": 0,
        "speculation": "fixed",
        "drafters": '["reference"]',
    }
    with (
        InstanceProcess(model, redis_url, folder / "v1", instance_id="one", **common) as v1,
        InstanceProcess(model, redis_url, folder / "v2", instance_id="two", engine="v2", **common) as v2,
    ):
        yield v1, v2


def items(references: Sequence[Sequence[int]] = ((),) * SAMPLES) -> list[pb.WorkItem]:
    random = Random(5)
    return [
        item(
            i,
            [random.randrange(2, VOCAB_SIZE) for _ in range(20 + 5 * i)],
            seed=random.getrandbits(64),
            max_tokens=TOKENS,
            reference_token_ids=references[i],
        )
        for i in range(SAMPLES)
    ]


async def test_its_tokens_are_those_of_v1_and_come_in_fewer_steps(instances: Instances) -> None:
    plain = await generate(instances[0].address, items())
    references = [list(plain[i].tokens) for i in range(SAMPLES)]
    for i, tokens in enumerate(references):
        # The later ones are wrong somewhere.
        tokens[i::10] = tokens[i::10] if i < 4 else [(token + 1) % VOCAB_SIZE for token in tokens[i::10]]
    found = await generate(instances[1].address, items(references))
    for i, outcome in plain.items():
        assert found[i].tokens == outcome.tokens
        assert found[i].reason == outcome.reason
        assert found[i].logprobs == pytest.approx(outcome.logprobs, abs=2e-5)
    assert sum(_steps(each) for each in found.values()) < sum(_steps(each) for each in plain.values()) / 2


def _steps(outcome: Outcome) -> int:
    assert outcome.finished is not None
    return outcome.finished.decode_steps


async def test_requests_between_its_steps_change_no_token(instances: Instances) -> None:
    """Samples arrive and are aborted while a step is in flight."""
    plain = await generate(instances[0].address, items())
    async with calling(instances[1].address) as caller:
        for each in items():
            await caller.send(start=[each])
            if each.handle:
                await caller.started(each.handle - 1)
        await caller.send(abort=[SAMPLES - 1])
        found = await caller.ended(*range(SAMPLES))
    assert found[SAMPLES - 1].reason in ("ABORTED", plain[SAMPLES - 1].reason)
    for i in range(SAMPLES - 1):
        assert found[i].tokens == plain[i].tokens


@pytest.mark.parametrize("level", ["LENIENT", "REJECTION"])
async def test_it_serves_the_other_levels(instances: Instances, level: str) -> None:
    """Without drafts and without cached rollouts, where tokens do not depend on when a step was scheduled."""
    number = sample_pb2.ExactnessLevel.Value(f"EXACTNESS_LEVEL_{level}")
    asked = item(1, [5, 6, 7], seed=1, max_tokens=12, exactness={"level": number, "lenience": 1.0})
    expected, found = [(await generate(each.address, [asked]))[1] for each in instances]
    assert found.refused is None
    assert found.tokens == expected.tokens
    assert len(found.tokens) == 12
