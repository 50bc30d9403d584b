"""Both ends of the pipe to the training process: its client starts, calls and ends it; `main` serves the calls.

In a separate process, training's use of Python, torch's threads, its memory and its crashes do not affect the
service, and an update can be killed at any moment: nothing remains of work that was not saved.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import structlog

from services.contracts.errors import ServiceError
from services.drafter.config import DrafterConfig
from services.drafter.learning.data import Evaluation, TrainingSample, UpdateReport
from services.platform.launching import tied
from services.platform.observability.logs import configure_logging

log = structlog.get_logger(__name__)

LEARNER = "services.drafter.learning.learner:Learner"
"""The learner, as "module:class"."""


class TrainingFailed(Exception):
    """The learner raised; the message has the error. The call had no effect."""


class TrainingRefused(TrainingFailed):
    """The learner refused a checkpoint, a state or weights."""


class TrainingDied(Exception):
    """The training process is gone; unsaved updates are lost."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Result of an update over the samples of one or more policy versions.

    `kd_loss` is the mean per token, NaN if nothing could be learned. `missed` samples were learned from with the
    weights loaded last, because the weights of their policy version could not be loaded.
    """

    kd_loss: float
    samples: int
    tokens: int
    seconds: float
    policy_version: int
    missed: int


@dataclass(frozen=True, slots=True)
class CandidateComparison:
    """Acceptance lengths on the same samples; `current` is None if the drafter in use cannot be read."""

    candidate: float
    current: float | None
    kd_loss: float
    samples: int


class TrainingProcess:
    """One training process. One call at a time; start it from the main thread.

    Methods raise TrainingFailed when the learner raises, and TrainingDied when the process is gone.
    """

    def __init__(self, config: DrafterConfig, learner: str = LEARNER) -> None:
        self._config = config
        self._learner = learner
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._policy_version = 0

    @property
    def pid(self) -> int | None:
        """Process id while the process lives."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    async def start(self) -> None:
        """Start the process and load the policy that the instances start with."""
        ours, theirs = socket.socketpair()
        environment = dict(os.environ)
        if self._config.threads:
            environment |= {"OMP_NUM_THREADS": str(self._config.threads)}
        with theirs:
            # `tied` binds it to the thread that starts it, so asyncio's helper cannot be used.
            self._process = subprocess.Popen(  # noqa: ASYNC220
                tied([sys.executable, "-m", "services.drafter.training.process", str(theirs.fileno())]),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,
            )
        self._pipe = Connection(ours.detach())
        self._thread = ThreadPoolExecutor(1, "training")
        self._policy_version = 0
        await self._exchange((self._config, self._learner))

    async def stop(self) -> None:
        """Kill the process, even during a call; no effect if there is none."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)
        thread, self._thread = self._thread, None
        if thread is not None:
            # A call that was waiting for an answer has seen the end of the pipe by now.
            await asyncio.to_thread(thread.shutdown)
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the learner (learning/learner.py) and return its result."""
        return await self._exchange((method, arguments))

    async def update(
        self,
        samples: Sequence[TrainingSample],
        weights: Sequence[float],
        folder_of: Callable[[int], Path | None],
    ) -> UpdateResult:
        """Learn from samples with weights w(r); targets come from the policy version that drew each sample.

        `folder_of` returns the model folder of a policy version, or None if it is not known.
        """
        by_version: dict[int, list[int]] = defaultdict(list)
        for index, sample in enumerate(samples):
            by_version[sample.policy_version].append(index)
        reports: list[UpdateReport] = []
        missed = 0
        for version, chosen in sorted(by_version.items()):
            missed += 0 if await self._load_policy(version, folder_of(version)) else len(chosen)
            part = [samples[index] for index in chosen], [weights[index] for index in chosen]
            reports.append(await self.call("update", *part))
        learned = [each for each in reports if math.isfinite(each.kd_loss)]
        tokens = sum(each.tokens for each in learned)
        return UpdateResult(
            sum(each.kd_loss * each.tokens for each in learned) / tokens if tokens else math.nan,
            sum(each.samples for each in reports),
            sum(each.tokens for each in reports),
            sum(each.seconds for each in reports),
            self._policy_version,
            missed,
        )

    async def compare(self, samples: Sequence[TrainingSample], current: Path | None) -> CandidateComparison:
        """Evaluate the drafter as it is now, and the one in use, on the same samples."""
        candidate: Evaluation = await self.call("evaluate", samples)
        length = None
        if current is not None:
            try:
                length = (await self.call("evaluate", samples, current)).acceptance_length
            except TrainingRefused as error:
                log.error("drafter_in_use_unreadable", path=str(current), error=str(error))
        return CandidateComparison(candidate.acceptance_length, length, candidate.kd_loss, candidate.samples)

    async def _load_policy(self, version: int, path: Path | None) -> bool:
        """Load the weights of a policy version, and return False if that is impossible."""
        if version == self._policy_version:
            return True
        if path is None:
            return False
        try:
            await self.call("set_policy", path, version)
        except TrainingFailed as error:
            # The trainer may remove folders of old versions at any moment.
            log.warning("policy_not_loaded", path=str(path), version=version, error=str(error))
            return False
        self._policy_version = version
        return True

    async def _exchange(self, message: Any) -> Any:
        pipe, thread = self._pipe, self._thread
        if pipe is None or thread is None:
            raise TrainingDied("the training process was not started")
        loop = asyncio.get_running_loop()
        try:
            outcome, result = await loop.run_in_executor(thread, _send_and_receive, pipe, message)
        except (EOFError, OSError) as error:
            raise TrainingDied(f"the training process is gone: {error!r}") from error
        if outcome != "done":
            raise (TrainingRefused if outcome == "refused" else TrainingFailed)(result)
        return result


def _send_and_receive(pipe: Connection, message: Any) -> Any:
    pipe.send(message)
    return pipe.recv()


def main(descriptor: int) -> None:
    """Hold the learner and answer its calls in order (`python -m services.drafter.training.process FD`).

    It ends when the pipe is closed. The first message is (config, factory), later ones are (method, arguments).
    """
    pipe = Connection(descriptor)
    try:
        config, factory = pipe.recv()
        os.nice(config.nice)
        configure_logging("drafter-trainer", config)
        learner: list[Any] = []
        _answer(pipe, lambda: learner.append(_make_learner(config, factory)))
        while learner:
            name, arguments = pipe.recv()
            _answer(pipe, partial(getattr(learner[0], name), *arguments))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _make_learner(config: DrafterConfig, factory: str) -> Any:
    """Return a services.drafter.learning.learner.Learner, or the double that `factory` ("module:class") names."""
    if config.threads:
        import torch

        torch.set_num_threads(config.threads)
    module, _, name = factory.partition(":")
    return getattr(importlib.import_module(module), name)(config.model, config.learning(), None)


def _answer(pipe: Connection, call: Callable[[], Any]) -> None:
    """Send ("done", result), ("refused", message) for a ServiceError, or ("failed", message) for another error."""
    try:
        result = call()
    except Exception as error:
        log.exception("training_failed")
        outcome = "refused" if isinstance(error, ServiceError) else "failed"
        pipe.send((outcome, f"{type(error).__name__}: {error}"))
    else:
        pipe.send(("done", result))


if __name__ == "__main__":
    main(int(sys.argv[1]))
