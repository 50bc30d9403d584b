"""An instance with an EAGLE-3 head: switched on by a flag, seen in results and metrics, and given other heads."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from redis.asyncio import Redis

from paceline.internal.v1 import drafter_pb2 as pb
from paceline.internal.v1 import drafter_pb2_grpc as rpc
from services.contracts.learner import DrafterHistory, DrafterKeys, PublishedDrafter
from tests.integration.generation.conftest import Policy
from tests.support.eagle3 import head_shape, random_head, save_head
from tests.support.instances import CALL, InstanceProcess, stub_of
from tests.support.models import tiny_model

pytestmark = pytest.mark.timeout(300)
_HANDLES = (1, 2, 3, 4)
_NAMESPACE = "eagle3-tests"


async def test_an_instance_drafts_with_a_head_and_takes_another(
    redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder: Path = tmp_path_factory.mktemp("eagle3-instance")
    model = tiny_model(folder / "model")
    first, second, third = (
        save_head(random_head(head_shape(model, draft_vocabulary=300), version), folder, version)
        for version in (1, 2, 3)
    )
    # Published before the instance starts: it begins with that one.
    async with Redis.from_url(redis_url) as redis:
        published = PublishedDrafter(2, str(second.path), second.sha256)
        await redis.set(DrafterKeys(_NAMESPACE).published, DrafterHistory(published).to_json())
    settings = {"block_size": 32, "namespace": _NAMESPACE, "speculation": "fixed"}
    alone = {"drafters": "reference", "drafts": False}
    with InstanceProcess(
        model, redis_url, folder, eagle3=str(first.path), eagle3_tokens=4, **settings, **alone
    ) as instance:
        async with stub_of(instance.address) as stub, grpc.aio.insecure_channel(instance.address) as channel:
            drafts = rpc.DraftModelServiceStub(channel)

            async def in_use() -> pb.GetDraftModelResponse:
                return await drafts.GetDraftModel(pb.GetDraftModelRequest(), timeout=CALL)

            async def load(version: int, path: Path, sha256: str) -> int:
                request = pb.LoadDraftModelRequest(drafter_version=version, path=str(path), sha256=sha256)
                return (await drafts.LoadDraftModel(request, timeout=CALL)).previous_drafter_version

            policy = Policy(instance.address, stub)
            await policy.look()
            recalled = await in_use()
            assert (recalled.drafter_version, recalled.sha256) == (2, second.sha256)
            tokens = []
            for version, made in ((2, second), (3, third)):
                if version == 3:
                    assert await load(3, made.path, made.sha256) == 2
                    assert (await in_use()).drafts == 0
                outcomes = await policy.ask(*[policy.item(handle) for handle in _HANDLES])
                tokens.append({handle: outcome.tokens for handle, outcome in outcomes.items()})
                sources = [each for outcome in outcomes.values() for each in outcome.finished.draft_sources]
                assert {each.drafter for each in sources} == {"eagle3"}
                found = await in_use()
                assert (found.drafter_version, found.sha256) == (version, made.sha256)
                assert 0 < found.drafts < found.draft_tokens
                # What was verified of each draft is at most what was compared.
                accepted = sum(each.accepted for each in sources)
                assert 0 < accepted <= found.accepted_tokens <= found.draft_tokens
            # Another head, the same tokens.
            assert tokens[0] == tokens[1]
            weights = second.path / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-1])
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await load(4, second.path, second.sha256)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "SHA-256" in (refused.value.details() or "")
            assert (await in_use()).drafter_version == 3
        metrics = instance.metrics()
    assert metrics["paceline_eagle3_drafter_version"] == 3
    assert metrics["paceline_eagle3_swaps_total"] == 2
    assert metrics["paceline_eagle3_refused_total"] == 1
    assert metrics["paceline_eagle3_memory_bytes"] > 0
    assert metrics["paceline_eagle3_draft_tokens_total"] > metrics["paceline_eagle3_draft_steps_total"] > 0
    assert metrics["paceline_eagle3_caught_up_tokens_total"] > 0
    assert not any(name.startswith("paceline_speculation_drafter_faults_total{") for name in metrics)
