"""Processes of the tests that have their modules imported already, of which a run of the tests starts hundreds.

    process = forked([sys.executable, "-m", "services.generation", ...], environment, log)

There are three processes to fork from: one with vLLM, for instances, one with vLLM and its V2 runner, and a small
one for what controls them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from services.local.child import Process, ProcessSpec, spawned
from services.local.zygote import Forked, Zygote

INSTANCES = frozenset(
    {"paceline", "services.generation", "tests.support.breaking_instance", "tests.support.engine_process"}
)
"""Modules that are forked from where vLLM is imported."""
NO_ENGINES = "TESTS_WITHOUT_ENGINES"
"""Variable that is set where no test may start an engine (`--fast`)."""
_SERVICES = tuple(
    f"services.{name}" for name in ("bubbles", "drafter", "drafts", "gateway", "policy", "reallocator")
)
_TOOLS = (
    "services.facade",
    "services.models",
    "services.platform.grpc.health",
    "tests.support.cluster.valkey",
)
CONTROL = frozenset({*_SERVICES, *_TOOLS, "tests.support.fake_learner_service"})
"""Modules that are forked from where nothing large is imported."""
_OFFLINE = {"HF_HUB_OFFLINE": "1"}
# vLLM imports the last three when it builds a worker and loads a model. Nothing here may import numba: an engine
# cannot be built after it.
_INSTANCE_IMPORTS = (
    "services.generation.__main__",
    "services.generation.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.layers.quantization.online.base",
)
_instances = Zygote(*_INSTANCE_IMPORTS, environment=_OFFLINE)
_v2_instances = Zygote("tests.support.v2_first", *_INSTANCE_IMPORTS, environment=_OFFLINE)
_control = Zygote(
    *[f"{name}.__main__" for name in _SERVICES], "services.platform.grpc.health", environment=_OFFLINE
)


def forked(
    argv: Sequence[str],
    environment: Mapping[str, str],
    log: BinaryIO,
    cores: Sequence[int] = (),
    pipe: int | None = None,
    *,
    v2: bool = False,
) -> Forked:
    """Return a process out of one of this process's zygotes (see `Zygote.fork`): [python, -m, module, flags...].

    With `v2` out of one in which vLLM was imported for its V2 runner.
    """
    # A module that enters a container names the one to run in it behind itself.
    zygote = _control
    if INSTANCES.intersection(argv):
        assert NO_ENGINES not in os.environ, "a test of --fast starts an engine: see FAST_FOLDERS"
        zygote = _v2_instances if v2 else _instances
    return zygote.fork(argv, environment, cores, log, pipe)


def launch(spec: ProcessSpec, log: BinaryIO) -> Process:
    """For `services.local.Platform`: its services are forked, all else is started as always."""
    if spec.argv[1] == "-m" and spec.argv[2] in INSTANCES | CONTROL:
        return forked(spec.argv, {**os.environ, **spec.environment}, log, spec.cores)
    return spawned(spec, log)
