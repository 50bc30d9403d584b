"""Deltas and adapters in a running instance: it serves the tokens of the full weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import load_file

from paceline import Adapter, WeightFolder
from paceline.internal.v1 import generation_pb2 as pb
from paceline.weights import delta, expansion, safetensors
from paceline.weights.expansion import BaseWeights
from services.generation.weights.adapters import merged, plan_merge
from tests.integration.generation.conftest import Policy
from tests.support.instances import CALL, InstanceProcess, stub_of

HANDLES = range(1, 9)
Tensors = dict[str, torch.Tensor]
CONFIG = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"]}


@pytest.fixture(scope="module")
def keeping(
    models: tuple[Path, Path], start: Callable[..., InstanceProcess], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[InstanceProcess]:
    """An instance that keeps weights."""
    with start(models[0], "keeping", adopted_weights=tmp_path_factory.mktemp("adopted")) as process:
        yield process


@pytest.fixture
async def kept(keeping: InstanceProcess) -> AsyncIterator[Policy]:
    async with stub_of(keeping.address) as stub:
        policy = Policy(keeping.address, stub)
        await policy.look()
        yield policy


async def serve(policy: Policy, **disk: str) -> pb.StageWeightsResponse:
    """Serve weights as the next version."""
    version = policy.version + 1
    request = pb.StageWeightsRequest(policy_version=version, disk=disk)
    staged: pb.StageWeightsResponse = await policy.stub.StageWeights(request, timeout=CALL)
    await policy.apply(version)
    return staged


async def test_a_delta_gives_the_tokens_of_a_full_push(
    kept: Policy, models: tuple[Path, Path], tmp_path: Path
) -> None:
    weights = WeightFolder(tmp_path / "weights", models[0])
    first: Tensors = load_file(models[1] / "model.safetensors")
    # As an optimizer's step does: some numbers move, by little.
    step = torch.Generator().manual_seed(0)
    second = {
        name: torch.where(torch.rand(each.shape, generator=step) < 0.1, each * 1.2, each)
        for name, each in first.items()
    }
    base, full = weights.write(1, first), weights.write(2, second)
    await serve(kept, path=str(base), checksum=safetensors.checksum(base))
    old = await kept.tokens(HANDLES)
    delta.write(base, kept.version, full, tmp_path / "delta")
    alone = {"delta": str(tmp_path / "delta"), "checksum": safetensors.checksum(full)}
    staged = await serve(kept, **alone)
    assert staged.checksum == safetensors.checksum(full)
    expanded = await kept.tokens(HANDLES)
    assert all(expanded[handle] != old[handle] for handle in HANDLES)
    await serve(kept, path=str(base))
    assert await kept.tokens(HANDLES) == old
    await serve(kept, path=str(full))
    assert await kept.tokens(HANDLES) == expanded
    # Pruned by now: the first version is the one before the one before.
    with pytest.raises(grpc.aio.AioRpcError, match="builds on weights that are not here") as caught:
        await serve(kept, **alone | {"checksum": "index-sha256:another"})
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_an_adapter_gives_the_tokens_of_the_merged_weights(
    kept: Policy, models: tuple[Path, Path], tmp_path: Path
) -> None:
    weights = WeightFolder(tmp_path / "weights", models[0])
    state: Tensors = load_file(models[0] / "model.safetensors")
    base = BaseWeights(0, safetensors.checksum(models[0]))
    chance = torch.Generator().manual_seed(0)
    for _ in range(2):  # the second is merged with the base, not with the first
        matrices = {
            f"base_model.model.{name.removesuffix('weight')}lora_{side}.weight": torch.randn(
                *((4, each.shape[1]) if side == "A" else (each.shape[0], 4)), generator=chance
            )
            * 0.05
            for name, each in state.items()
            if "q_proj" in name or "down_proj" in name
            for side in "AB"
        }
        folder = weights.write_adapter(1, Adapter(matrices, CONFIG), base)
        await serve(kept, path=str(folder), checksum=expansion.checksum(folder))
        served = await kept.tokens(HANDLES)
    plan = plan_merge(
        CONFIG,
        {name: tuple(each.shape) for name, each in matrices.items()},
        {name: tuple(each.shape) for name, each in state.items()},
    )
    full = weights.write(2, merged(state, plan, matrices, 1))
    await serve(kept, path=str(models[0]))
    plain = await kept.tokens(HANDLES)
    await serve(kept, path=str(full))
    assert await kept.tokens(HANDLES) == served
    assert all(served[handle] != plain[handle] for handle in HANDLES)
