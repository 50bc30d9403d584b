"""New weights in a running instance: checked before they reach the engine, and nothing of the old is left."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import weight_pb2
from tests.integration.generation.conftest import PROMPT, Policy
from tests.support.instances import CALL, InstanceProcess, calling

HANDLES = range(1, 13)


@pytest.fixture
async def updated(policy: Policy, models: tuple[Path, Path]) -> AsyncIterator[Policy]:
    """The shared instance, for tests that change its weights: it has the first model's again afterwards."""
    yield policy
    await policy.update(models[0])


async def refusal(policy: Policy, version: int, folder: Path, checksum: str = "") -> grpc.aio.AioRpcError:
    """What staging a folder is refused with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await policy.stage(version, folder, checksum)
    return caught.value


async def test_new_weights_give_the_tokens_of_an_instance_started_on_them(
    updated: Policy, fresh: Policy, models: tuple[Path, Path]
) -> None:
    old = await updated.tokens(HANDLES)
    # Asked again, the prompts come out of the prefix cache.
    assert await updated.tokens(HANDLES) == old
    staged = await updated.stage(updated.version + 1, models[1])
    content = (models[1] / "model.safetensors").read_bytes()
    assert staged.checksum == f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert (await updated.look()).staged_policy_version == updated.version + 1
    applied = await updated.apply(updated.version + 1)
    assert applied.dropped_blocks > 0
    assert (await updated.look()).staged_policy_version == 0
    new = await updated.tokens(HANDLES)
    assert new == await fresh.tokens(HANDLES)
    assert all(new[handle] != old[handle] for handle in HANDLES)
    await updated.update(models[0])
    assert await updated.tokens(HANDLES) == old


async def test_a_prefix_of_the_old_policy_is_gone_on_with_by_the_new_one(
    updated: Policy, fresh: Policy, models: tuple[Path, Path]
) -> None:
    old = await updated.tokens([1], ignore_eos=True)
    prefix = old[1][:20]
    await updated.update(models[1])
    resumed = await updated.tokens([1], ignore_eos=True, prefix_token_ids=prefix)
    assert resumed[1] != old[1][20:]
    assert resumed == await fresh.tokens([1], ignore_eos=True, prefix_token_ids=prefix)


async def test_staging_disturbs_no_sample(updated: Policy, models: tuple[Path, Path]) -> None:
    long: dict[str, Any] = {"max_tokens": 512 - PROMPT, "ignore_eos": True}
    whole = await updated.tokens([1, 2], **long)
    async with calling(updated.address) as caller:
        await caller.send([updated.item(handle, **long) for handle in (1, 2)])
        await caller.started(1, 2)
        await updated.stage(updated.version + 1, models[1])
        outcomes = await caller.ended(1, 2)
    assert {handle: outcome.tokens for handle, outcome in outcomes.items()} == whole


async def test_weights_are_not_applied_while_samples_run(updated: Policy, models: tuple[Path, Path]) -> None:
    whole = await updated.tokens([1, 2])
    served, version = updated.version, updated.version + 1
    await updated.stage(version, models[1])
    await updated.pause()
    async with calling(updated.address) as caller:
        await caller.send([updated.item(1), updated.item(2)])
        await updated.until_samples(2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await updated.apply(version)
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert "2 samples" in (caught.value.details() or "")
        await updated.resume()
        outcomes = await caller.ended(1, 2)
    assert {handle: outcome.tokens for handle, outcome in outcomes.items()} == whole
    assert (await updated.look()).instance.policy_version == served
    await updated.apply(version)
    assert updated.version == version


async def test_only_what_is_staged_is_applied(policy: Policy, models: tuple[Path, Path]) -> None:
    version = policy.version
    before = await policy.tokens([1])
    await policy.stage(version + 1, models[1])
    for other in (version + 2, version + 7):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await policy.apply(other)
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert f"version {other} is not staged" in (caught.value.details() or "")
    # Discarding another version leaves it; applying what is served already is no change.
    await policy.stub.DiscardWeights(pb.DiscardWeightsRequest(policy_version=version + 2), timeout=CALL)
    assert (await policy.look()).staged_policy_version == version + 1
    assert (await policy.apply(version)).dropped_blocks == 0
    await policy.stub.DiscardWeights(pb.DiscardWeightsRequest(policy_version=version + 1), timeout=CALL)
    assert (await policy.look()).staged_policy_version == 0
    with pytest.raises(grpc.aio.AioRpcError, match="not staged"):
        await policy.apply(version + 1)
    assert policy.version == version
    assert await policy.tokens([1]) == before


async def test_samples_of_the_old_version_are_refused_after_an_update(
    updated: Policy, models: tuple[Path, Path]
) -> None:
    stale = updated.item(1)
    await updated.update(models[1])
    outcomes = await updated.ask(stale, updated.item(2))
    assert outcomes[1].refused is not None
    assert outcomes[1].refused.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
    assert outcomes[2].finished is not None


Tensors = dict[str, torch.Tensor]
NAME = "model.layers.1.mlp.up_proj.weight"


def _without(tensors: Tensors) -> None:
    del tensors[NAME]


def _with_extra(tensors: Tensors) -> None:
    tensors["model.layers.7.mlp.up_proj.weight"] = tensors[NAME].clone()


def _transposed(tensors: Tensors) -> None:
    tensors[NAME] = tensors[NAME].T.contiguous()


def _integers(tensors: Tensors) -> None:
    tensors[NAME] = tensors[NAME].to(torch.int32)


def _nan(tensors: Tensors) -> None:
    tensors[NAME][3, 5] = math.nan


def _infinite(tensors: Tensors) -> None:
    tensors[NAME][3, 5] = -math.inf


SPOILT: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "missing tensor": (_without, "is missing"),
    "extra tensor": (_with_extra, "is not a tensor of the model"),
    "wrong shape": (_transposed, "has shape [128, 256], allowed is [256, 128]"),
    "integers": (_integers, "allowed are BF16, F16, F32, F64"),
    "NaN": (_nan, "1 values that are NaN or infinite"),
    "infinity": (_infinite, "1 values that are NaN or infinite"),
}


async def test_every_bad_folder_is_refused_and_the_engine_goes_on_unharmed(
    policy: Policy, models: tuple[Path, Path], tmp_path: Path
) -> None:
    version = policy.version + 1
    before = await policy.tokens(HANDLES)
    good = models[1] / "model.safetensors"
    for what, (spoil, complaint) in SPOILT.items():
        tensors = load_file(good)
        spoil(tensors)
        folder = tmp_path / what
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        error = await refusal(policy, version, folder)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, what
        assert complaint in (error.details() or ""), what

    content = good.read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    folder = tmp_path / "cut"
    folder.mkdir()
    for size in (0, 5, 8, header // 2, header, header + 1000, len(content) - 1):
        (folder / "model.safetensors").write_bytes(content[:size])
        assert (await refusal(policy, version, folder)).code() == grpc.StatusCode.DATA_LOSS, size
    error = await refusal(policy, version, models[1], "sha256:" + "0" * 64)
    assert error.code() == grpc.StatusCode.DATA_LOSS
    assert "sha256:0000" in (error.details() or "")

    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "nowhere", tmp_path / "empty", good):
        error = await refusal(policy, version, folder)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert str(folder) in (error.details() or "")

    assert (await policy.look()).staged_policy_version == 0
    assert policy.version == version - 1
    assert await policy.tokens(HANDLES) == before


async def test_a_refused_folder_leaves_what_is_staged_of_its_version_only(
    updated: Policy, models: tuple[Path, Path], tmp_path: Path
) -> None:
    version = updated.version + 1
    await updated.stage(version, models[1])
    await refusal(updated, version, tmp_path)
    assert (await updated.look()).staged_policy_version == version
    # Another version supersedes it before there is room for both.
    await refusal(updated, version + 1, tmp_path)
    assert (await updated.look()).staged_policy_version == 0
    await updated.stage(version, models[1])
    await updated.apply(version)


async def test_weights_of_a_drafter_are_refused(policy: Policy, models: tuple[Path, Path]) -> None:
    request = pb.StageWeightsRequest(
        policy_version=1, target=weight_pb2.WEIGHT_TARGET_DRAFTER, disk={"path": str(models[1])}
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await policy.stub.StageWeights(request, timeout=CALL)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_metrics_time_both_phases(
    updated: Policy, instance: InstanceProcess, models: tuple[Path, Path]
) -> None:
    await updated.update(models[1])
    metrics = instance.metrics()
    for phase in ("stage", "apply"):
        assert metrics[f'paceline_generation_weight_seconds_count{{phase="{phase}"}}'] > 0
    assert metrics["paceline_generation_policy_version"] == updated.version
