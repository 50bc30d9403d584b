"""The process that trains: holds the learner, and does what it is told over a pipe, one thing after the other.

`python -m services.drafter.trainer FD` is started by services/drafter/training.py. It is a process of its own
so that nothing of it (Python, torch's threads, memory, a crash) is in the way of the service, and so that an
update can be ended at any moment: whatever was not saved then never was.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import structlog

from services.drafter.checkpoint import Checkpoint
from services.drafter.learning.settings import LearningSettings
from services.drafter.messages import Begin, Compared, Part, Updated
from services.drafter.rollout import Rollout
from services.platform.errors import ServiceError
from services.platform.logs import configure_logging

log = structlog.get_logger(__name__)


class Learns(Protocol):
    """What is needed of services.drafter.learning.learner.Learner, and is said there."""

    def __init__(
        self, policy_path: Path, settings: LearningSettings, checkpoint: Path | None = None
    ) -> None: ...
    def set_policy(self, path: Path, version: int) -> None: ...
    def adopt(self, checkpoint: Path, sha256: str = "") -> None: ...
    def update(self, rollouts: Sequence[Rollout], weights: Sequence[float]) -> Any: ...
    def evaluate(self, rollouts: Sequence[Rollout], drafter: Path | None = None) -> Any: ...
    def save(self, parent: Path, version: int) -> Checkpoint: ...
    def save_state(self, path: Path) -> None: ...
    def load_state(self, path: Path) -> None: ...


class Trainer:
    """The learner and what is loaded. Methods are the messages."""

    def __init__(self, begin: Begin) -> None:
        module, _, name = begin.factory.partition(":")
        factory: type[Learns] = getattr(importlib.import_module(module), name)
        self._learner = factory(begin.config.model, begin.config.learning(), None)
        # What the fleet starts with.
        self._version = 0

    def load_state(self, path: Path) -> None:
        """Goes on from a state."""
        self._learner.load_state(path)

    def save_state(self, path: Path) -> None:
        """Writes the state."""
        self._learner.save_state(path)

    def adopt(self, path: Path, sha256: str) -> None:
        """Goes on from another drafter."""
        self._learner.adopt(path, sha256)

    def save(self, parent: Path, version: int) -> Checkpoint:
        """Writes the drafter."""
        return self._learner.save(parent, version)

    def update(self, parts: Sequence[Part]) -> Updated:
        """Learns from the rollouts of each policy version with that policy."""
        samples = tokens = skipped = missed = 0
        seconds = loss = weight = 0.0
        for part in parts:
            missed += 0 if self._set_policy(part.path, part.version) else len(part.rollouts)
            report = self._learner.update(part.rollouts, part.weights)
            samples, tokens = samples + report.samples, tokens + report.tokens
            skipped, seconds = skipped + report.skipped, seconds + report.seconds
            if math.isfinite(report.kd_loss):
                loss, weight = loss + report.kd_loss * report.tokens, weight + report.tokens
        mean = loss / weight if weight else math.nan
        return Updated(mean, samples, tokens, skipped, seconds, self._version, missed)

    def compare(self, rollouts: Sequence[Rollout], current: Path | None) -> Compared:
        """Measures the drafter as it is now, and the one in use, on the same rollouts."""
        candidate = self._learner.evaluate(rollouts)
        length = None
        if current is not None:
            try:
                length = self._learner.evaluate(rollouts, current).acceptance_length
            except ServiceError as error:
                log.error("drafter_in_use_unreadable", path=str(current), error=str(error))
        return Compared(candidate.acceptance_length, length, candidate.kd_loss, candidate.samples)

    def _set_policy(self, path: Path | None, version: int) -> bool:
        if version == self._version:
            return True
        if path is None:
            return False
        try:
            self._learner.set_policy(path, version)
        except (ServiceError, OSError, ValueError, KeyError, RuntimeError) as error:
            # Folders of old versions are removed by the trainer, at any moment.
            log.warning("policy_not_loaded", path=str(path), version=version, error=str(error))
            return False
        self._version = version
        return True


def main(descriptor: int) -> None:
    """Serves until the pipe is closed."""
    pipe = Connection(descriptor)
    try:
        begin: Begin = pipe.recv()
        os.nice(begin.config.nice)
        configure_logging("drafter-trainer", begin.config)
        _limit_threads(begin.config.threads)
        trainer = _answer(pipe, lambda: Trainer(begin), keep=True)
        while trainer is not None:
            name, arguments = pipe.recv()
            _answer(pipe, lambda name=name, given=arguments: getattr(trainer, name)(*given))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _answer(pipe: Connection, do: Any, *, keep: bool = False) -> Any:
    try:
        result = do()
    except Exception as error:
        log.exception("training_failed")
        pipe.send((False, f"{type(error).__name__}: {error}"))
        return None
    pipe.send((True, None if keep else result))
    return result


def _limit_threads(threads: int) -> None:
    if threads:
        import torch

        torch.set_num_threads(threads)


if __name__ == "__main__":
    main(int(sys.argv[1]))
