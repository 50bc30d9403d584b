"""Launch of a platform's processes as forks of two that have imported, once, what each would import for itself."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import BinaryIO

from services.generation.engine.runner_choice import V2
from services.local.child import ChildSpec, Process, spawned
from services.local.config import PlatformConfig
from services.local.zygote import Zygote

INSTANCE = "services.generation"
_CONTROL = tuple(
    f"services.{name}" for name in ("bubbles", "drafter", "drafts", "gateway", "policy", "reallocator")
)
_RUNNER_FLAG, _RUNNER_VARIABLE = "--engine", "PACELINE_ENGINE"


def is_forked(spec: ChildSpec) -> bool:
    """Return True for a process that may be forked; all others are executed anew.

    Those are instances on GPUs, since CUDA is not to be forked, and those on vLLM's V2 runner, which is chosen
    before vLLM is imported; what is no service; and everything on other systems than Linux.
    """
    if sys.platform != "linux" or list(spec.argv[:2]) != [sys.executable, "-m"]:
        return False
    module, *flags = spec.argv[2:]
    return module in _CONTROL or (
        module == INSTANCE and "CUDA_VISIBLE_DEVICES" not in spec.environment and _runner(spec, flags) != V2
    )


class Forks:
    """Starts processes for a `Platform`: by a fork where that may be, and anew where not, or where a fork fails."""

    def __init__(self, config: PlatformConfig) -> None:
        """Start nothing yet."""
        environment, log = config.environment, config.logs / "imports.log"
        modules = [f"{name}.__main__" for name in _CONTROL]
        self._control = Zygote(*modules, environment=environment, log=log)
        self._instances = Zygote("services.generation.preload", environment=environment, log=log)
        self._closed = False

    def begin(self, specs: list[ChildSpec]) -> None:
        """Begin to import what these processes need; the folder of logs is there."""
        for spec in specs:
            if is_forked(spec):
                # Where that fails, the process is started anew.
                with suppress(OSError):
                    self._zygote(spec).begin()

    def close(self) -> None:
        """End what was forked and still runs."""
        self._closed = True
        self._control.close()
        self._instances.close()

    def __call__(self, spec: ChildSpec, log: BinaryIO) -> Process:
        """Start a process whose output goes to a file."""
        if not is_forked(spec):
            return spawned(spec, log)
        # As OpenMP counts where nobody tells it.
        threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
        try:
            return self._zygote(spec).fork(
                spec.argv, {**threads, **os.environ, **spec.environment}, spec.cores, log
            )
        except RuntimeError:
            if self._closed:
                raise
            # It says itself what is wrong, in its own log.
            return spawned(spec, log)

    def _zygote(self, spec: ChildSpec) -> Zygote:
        return self._instances if spec.argv[2] == INSTANCE else self._control


def _runner(spec: ChildSpec, flags: list[str]) -> str:
    """Return the runner that an instance is told to use; the last of equal flags counts."""
    told = spec.environment.get(_RUNNER_VARIABLE, os.environ.get(_RUNNER_VARIABLE, ""))
    for place, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if name == _RUNNER_FLAG:
            told = value if equals else "".join(flags[place + 1 : place + 2])
    return told
