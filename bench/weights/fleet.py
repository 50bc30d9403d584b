"""Push weights to fleets of one model, on a platform with a real gateway, Redis and instances.

Instances are `bench.weights.instance`. Each has its own folder, as on separate hosts. The trainer is a process that
holds a model, changes it, and pushes it on request.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

import paceline
from bench.report import say
from bench.weights.models import Model, tensors_of
from bench.worker import PipedWorker
from paceline import WeightFolder, WeightStream
from services.local import Platform, PlatformConfig
from services.local.child import Process, ProcessSpec, spawned

FOLDER, STREAM = "folder", "stream"
"""Transports."""


@dataclass(frozen=True, slots=True)
class Push:
    """Seconds of a push until the fleet served the weights; a phase takes as long as on the slowest instance."""

    seconds: float
    stage_seconds: float
    apply_seconds: float


class TrainerProcess(PipedWorker):
    """The trainer process, which holds the weights of a model."""

    def __init__(self, gateway: str, model: Path, folder: Path) -> None:
        """Hold the weights of `model`, and push them to a gateway, through `folder` if not by stream."""
        super().__init__(_build, gateway, model, folder)

    def push(self, transport: str, instances: int) -> Push:
        """Change the weights a little, and push them. WorkerFailed if not all `instances` apply them."""
        pushed: Push = self.ask((transport, instances))
        return pushed


def _build(gateway: str, model: Path, folder: Path) -> Callable[[tuple[str, int]], Push]:
    import torch

    torch.set_num_threads(1)
    weights = tensors_of(model)
    transports = {FOLDER: WeightFolder(folder, model), STREAM: WeightStream()}
    client = paceline.Client(gateway)

    def push(order: tuple[str, int]) -> Push:
        transport, instances = order
        for tensor in weights.values():
            tensor.mul_(1.0001)
        with client.run(f"push-by-{transport}", weights=transports[transport]) as run:
            began = time.monotonic()
            done = run.push_weights(weights).instances
            seconds = time.monotonic() - began
        if len(done) != instances or not all(each.applied for each in done):
            errors = ", ".join(f"{each.instance_id}: {each.error}" for each in done if not each.applied)
            raise RuntimeError(f"{len(done)} of {instances} instances took part; not applied: {errors}")
        stage, apply = (
            max(getattr(each, name) for each in done) for name in ("stage_seconds", "apply_seconds")
        )
        return Push(seconds, stage, apply)

    return push


def transfers(model: Model, folder: Path, fleets: Sequence[int], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each fleet, largest first, and each transport. The first push of each kind is not timed."""
    with (
        _platform(model.folder, folder, max(fleets)) as platform,
        TrainerProcess(platform.gateway_address, model.folder, folder / "versions") as trainer,
    ):
        for fleet in sorted(fleets, reverse=True):
            for left in platform.instances[fleet:]:
                if left.alive:
                    platform.remove(left.spec.name)
                    shutil.rmtree(platform.config.adopted / left.spec.name, ignore_errors=True)
            for transport in (FOLDER, STREAM):
                trainer.push(transport, fleet)
                yield _transfer(model, trainer, transport, fleet, rounds)


def _transfer(
    model: Model, trainer: TrainerProcess, transport: str, fleet: int, rounds: int
) -> dict[str, Any]:
    timed = list[Push]()
    for _ in range(rounds):
        os.sync()
        timed.append(trainer.push(transport, fleet))
    seconds = median(each.seconds for each in timed)
    return {
        "transport": transport,
        "megabytes": model.megabytes,
        "instances": fleet,
        "seconds": seconds,
        "seconds_of_rounds": [each.seconds for each in timed],
        "stage_seconds": median(each.stage_seconds for each in timed),
        "apply_seconds": median(each.apply_seconds for each in timed),
        "copy_seconds": model.copy_seconds,
        "check_seconds": model.check_seconds,
        "vs_copy_and_check": seconds / (model.copy_seconds + model.check_seconds),
    }


@contextmanager
def _platform(model: Path, folder: Path, instances: int) -> Iterator[Platform]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def launch(spec: ProcessSpec, log: BinaryIO) -> Process:
        argv = ["bench.weights.instance" if each == "services.generation" else each for each in spec.argv]
        return spawned(replace(spec, argv=argv), log)

    config = PlatformConfig(
        model=model,
        instances=instances,
        folder=folder,
        instance_options=("--speculation=off", "--no-drafts"),
        shared_weights=False,
        draft_stores=0,
        bubbles=False,
        policy=False,
        reallocator=False,
        environment={"OMP_NUM_THREADS": "1"},
        pin=False,
    )
    try:
        with Platform(config, launch=launch, report=say) as platform:
            yield platform
    finally:
        for each in "adopted", "versions":
            shutil.rmtree(folder / each, ignore_errors=True)
