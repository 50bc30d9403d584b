"""Two real instances on a tiny model that the tests of this folder share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import weight_pb2
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.instances import CALL, InstanceProcess, item
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.moving import Movers, moving

BLOCK = 32
PROMPT = 70
LENGTH = 300
SETTINGS: dict[str, Any] = {
    "block_size": BLOCK,
    "max_num_seqs": 16,
    "max_model_len": 1024,
    "namespace": "migration-tests",
    # Far longer than anything takes. Nobody waits for it: what goes wrong here is noticed at once.
    "migration_stall_seconds": 10.0,
    "migration_timeout_seconds": 30.0,
    "migration_claim_seconds": 4.0,
}


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy that all instances serve, with a tokenizer."""
    folder = tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)
    byte_tokenizer(folder, VOCAB_SIZE)
    return folder


@pytest.fixture(scope="package")
def pair(
    model: Path, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[InstanceProcess, InstanceProcess]]:
    """The two instances, started side by side."""
    made = tuple(
        InstanceProcess(
            model,
            redis_url,
            tmp_path_factory.mktemp(name),
            instance_id=name,
            threads_bind=str(core),
            **SETTINGS,
        )
        for core, name in enumerate(("first", "second"))
    )
    try:
        for process in made:
            process.launch()
        for process in made:
            process.wait_ready()
        yield made[0], made[1]
    finally:
        for process in made:
            process.stop()


@pytest.fixture
def revived(pair: tuple[InstanceProcess, InstanceProcess]) -> None:
    """Both are there, even if another test ended one."""
    for each in pair:
        if not each.alive:
            each.launch()
            each.wait_ready()


@pytest.fixture
async def movers(
    pair: tuple[InstanceProcess, InstanceProcess], model: Path, revived: None
) -> AsyncIterator[Movers]:
    """A caller of both, which finds them empty and leaves no block behind."""
    first, second = pair
    async with moving(first.address, second.address) as caller:
        await until_empty(caller)
        await level(caller, model)
        yield caller
    async with moving(*[each.address for each in pair if each.alive]) as caller:
        for place in range(len(caller.addresses)):
            await caller.resume_engine(place)
        await until_empty(caller)


async def until_empty(caller: Movers) -> None:
    """Wait until no instance has a sample or expects one, and every KV block is free."""
    async with asyncio.timeout(CALL):
        for place in range(len(caller.addresses)):
            now = await caller.samples(place)
            while now.samples or now.free_blocks != now.total_blocks or now.free_capacity != now.max_running:
                await asyncio.sleep(0.02)
                now = await caller.samples(place)


def prompt_of(handle: int) -> list[int]:
    """Return a prompt of the handle's own."""
    chosen = random.Random(handle)
    return [chosen.randrange(2, VOCAB_SIZE) for _ in range(PROMPT)]


def asked(handle: int, **fields: Any) -> pb.WorkItem:
    """Return an item with a prompt and a seed of its own."""
    own: dict[str, Any] = {"seed": 1000 + handle, "max_tokens": LENGTH, "ignore_eos": True}
    return item(handle, prompt_of(handle), **(own | fields))


async def stage_weights(movers: Movers, place: int, version: int, model: Path) -> None:
    """Have an instance read the weights in a folder, to become a version."""
    disk = {"path": str(model)}
    staging = pb.StageWeightsRequest(policy_version=version, disk=disk)
    await movers.generation[place].StageWeights(staging, timeout=CALL)


async def apply_weights(
    movers: Movers, place: int, version: int, in_flight: weight_pb2.InFlight = weight_pb2.IN_FLIGHT_REFUSE
) -> int:
    """Have an instance serve what it has staged; return how many samples go on."""
    request = pb.ApplyWeightsRequest(policy_version=version, in_flight=in_flight)
    applied: pb.ApplyWeightsResponse = await movers.generation[place].ApplyWeights(request, timeout=CALL)
    return applied.continued_samples


async def level(movers: Movers, model: Path) -> None:
    """Have both serve the same version: one that was started anew serves its first."""
    versions = [(await movers.samples(place)).policy_version for place in (0, 1)]
    movers.version = max(versions)
    for place in (0, 1):
        if versions[place] < movers.version:
            await stage_weights(movers, place, movers.version, model)
            await apply_weights(movers, place, movers.version)
