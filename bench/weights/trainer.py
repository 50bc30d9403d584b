"""Run a trainer in a separate process: it holds a model, changes it, and pushes it on request."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import paceline
from bench.weights.summary import FOLDER, STREAM
from bench.worker import PipedWorker
from paceline import InFlight, WeightFolder, WeightStream


@dataclass(frozen=True, slots=True)
class Push:
    """Result of a push. `began` and `ended` are monotonic; the seconds of a phase are of the slowest instance."""

    began: float
    ended: float
    instances: int
    stage_seconds: float
    apply_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds until the fleet served the weights."""
        return self.ended - self.began


class TrainerProcess(PipedWorker):
    """The trainer process, which holds the weights of a model."""

    def __init__(self, gateway: str, model: Path, folder: Path) -> None:
        """Hold the weights of `model`, and push them to a gateway, through `folder` if not by stream."""
        super().__init__(_build, gateway, model, folder)

    def push(self, transport: str, in_flight: InFlight = InFlight.REFUSE) -> Push:
        """Change the weights a little, and push them. WorkerFailed if the push fails."""
        pushed: Push = self.ask((transport, in_flight))
        return pushed


def _build(gateway: str, model: Path, folder: Path) -> Callable[[tuple[str, InFlight]], Push]:
    import torch
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    weights = {
        name: tensor.clone()
        for path in sorted(model.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    transports = {FOLDER: WeightFolder(folder, model), STREAM: WeightStream()}
    client = paceline.Client(gateway)

    def push(order: tuple[str, InFlight]) -> Push:
        transport, in_flight = order
        for tensor in weights.values():
            tensor.mul_(1.0001)
        with client.run(f"push-by-{transport}", weights=transports[transport]) as run:
            began = time.monotonic()
            done = run.push_weights(weights, in_flight=in_flight)
            return _outcome(began, time.monotonic(), done)

    return push


def _outcome(began: float, ended: float, done: paceline.UpdateFinished) -> Push:
    failed = [f"{each.instance_id}: {each.error}" for each in done.instances if not each.applied]
    if failed:
        raise RuntimeError(f"not applied: {', '.join(failed)}")
    return Push(
        began,
        ended,
        len(done.instances),
        max(each.stage_seconds for each in done.instances),
        max(each.apply_seconds for each in done.instances),
    )
