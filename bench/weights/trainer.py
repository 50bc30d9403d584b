"""Run a trainer in a separate process: it holds a model, changes it, and pushes it on request."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import paceline
from bench.weights.summary import FOLDER, STREAM
from paceline import InFlight, WeightFolder, WeightStream

_ANSWER_SECONDS = 300.0


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


class TrainerProcess:
    """Parent's side of the trainer process. Use it as a context manager."""

    def __init__(self, gateway: str, model: Path, folder: Path) -> None:
        """Hold the weights of `model`, and push them to a gateway, through `folder` if not by stream."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, gateway, model, folder), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        self._answer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        self._process.join(20)
        self._process.kill()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    def push(self, transport: str, in_flight: InFlight = InFlight.REFUSE) -> Push:
        """Change the weights a little, and push them. RuntimeError if the push fails."""
        self._pipe.send((transport, in_flight))
        pushed: Push = self._answer()
        return pushed

    def _answer(self) -> Any:
        if not self._pipe.poll(_ANSWER_SECONDS):
            raise TimeoutError(f"the trainer has not answered for {_ANSWER_SECONDS:.0f} s")
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer


def _serve(pipe: Connection, gateway: str, model: Path, folder: Path) -> None:
    try:
        import torch
        from safetensors.torch import load_file

        torch.set_num_threads(1)
        weights = {
            name: tensor.clone()
            for path in sorted(model.glob("*.safetensors"))
            for name, tensor in load_file(path).items()
        }
        transports: dict[str, WeightFolder | WeightStream] = {
            FOLDER: WeightFolder(folder, model),
            STREAM: WeightStream(),
        }
        with paceline.Client(gateway) as client:
            pipe.send(True)
            while True:
                transport, in_flight = pipe.recv()
                for tensor in weights.values():
                    tensor.mul_(1.0001)
                with client.run(f"push-by-{transport}", weights=transports[transport]) as run:
                    began = time.monotonic()
                    done = run.push_weights(weights, in_flight=in_flight)
                    ended = time.monotonic()
                pipe.send(_outcome(began, ended, done))
    except EOFError:
        return
    except BaseException:
        pipe.send(traceback.format_exc())


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
