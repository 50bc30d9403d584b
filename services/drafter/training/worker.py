"""Main program of the training process: it holds the learner and calls the methods requested over a pipe, in order.

services/drafter/training/process.py starts `python -m services.drafter.training.worker FD`. In a separate process,
training's use of Python, torch's threads, its memory and its crashes do not affect the service, and an update can
be killed at any moment: nothing remains of work that was not saved.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import structlog

from services.contracts.errors import ServiceError
from services.drafter.config import DrafterConfig
from services.platform.observability.logs import configure_logging

log = structlog.get_logger(__name__)


def main(descriptor: int) -> None:
    """Serve until the pipe is closed. The first message is (config, factory), later ones (method, arguments)."""
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
