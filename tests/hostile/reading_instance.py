"""An instance without a model whose weights go through the reader of real ones."""

from __future__ import annotations

import argparse
import asyncio
import signal
from functools import partial
from pathlib import Path

import grpc
import torch
from safetensors.torch import save_file

from paceline.internal.v1 import generation_pb2 as pb
from paceline.times import duration
from services.generation.server.weight_updates import read_in_thread
from services.generation.weights.adoption import AdoptedWeights
from services.generation.weights.expansion import GivenWeights, WeightReader
from services.generation.weights.staging import read_manifest
from services.platform.launching import write_ready_file
from tests.support.fake_instance import FakeInstance

TENSOR, SHAPE = "model.embed_tokens.weight", (6, 4)
"""The one tensor of the model that it pretends to serve."""
STEP_SECONDS = 0.005


class ReadingInstance(FakeInstance):
    """A fake instance whose weights go through the reader of real ones."""

    def __init__(self, folder: Path, redis_url: str, namespace: str, instance_id: str) -> None:
        super().__init__(redis_url, namespace, instance_id, step_seconds=STEP_SECONDS)
        served = folder / "served"
        served.mkdir(parents=True, exist_ok=True)
        save_file({TENSOR: torch.ones(SHAPE)}, served / "model.safetensors")
        manifest = read_manifest(served)
        self._reader = WeightReader(served, manifest, None, AdoptedWeights(folder / "adopted"))
        self._reading = asyncio.Lock()

    async def StageWeights(
        self, request: pb.StageWeightsRequest, context: grpc.aio.ServicerContext
    ) -> pb.StageWeightsResponse:
        """Read them in a thread."""
        disk = request.disk
        given = GivenWeights(Path(disk.path), disk.checksum)
        async with self._reading:
            staged = await read_in_thread(partial(self._reader.read, request.policy_version, given))
        self.staged = (request.policy_version, disk.path)
        return pb.StageWeightsResponse(checksum=staged.checksum, stage_time=duration(0.01))


async def _main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--id", "--redis-url", "--namespace"):
        parser.add_argument(flag, required=True)
    for flag in ("--folder", "--ready-file"):
        parser.add_argument(flag, required=True, type=Path)
    given = parser.parse_args()
    instance = ReadingInstance(given.folder, given.redis_url, given.namespace, given.id)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with instance:
        write_ready_file(given.ready_file, instance.address, 0)
        await ended.wait()


if __name__ == "__main__":
    asyncio.run(_main())
