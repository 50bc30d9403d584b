"""Command lines of the platform's processes, and how they are started.

`Specs` has the command lines. `Forks` starts a process as a fork of one that has already imported its modules, or
executes it if a fork is not possible. `first_drafter` makes the EAGLE-3 head that a learner starts with.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from paceline.transport.channel import Tls
from services.contracts.drafter_checkpoint import folder_of
from services.generation.engine.environment import V2
from services.local.child import PlatformError, Process, ProcessSpec, spawned
from services.local.config import PlatformConfig
from services.local.zygote import Zygote

CPU_KV_BYTES = 1 << 30
"""KV memory of an instance on CPU, where vLLM would otherwise take all free memory."""
DRAFT_BYTES = 256 << 20
"""Memory of a draft store: about 30 million tokens, enough for a model that one machine trains."""
LEARNER_THREADS = 1
"""Threads of the learner, which yields to the instances on the cores that it shares with them."""
SNAPSHOT_SECONDS = 10
"""Interval of a draft store's snapshots."""

_HEAD_SECONDS = 600.0
_HEAD_TAIL = 2000
_INSTANCE = "services.generation"
_CONTROL = tuple(
    f"services.{name}" for name in ("bubbles", "drafter", "drafts", "gateway", "policy", "reallocator")
)
_RUNNER_FLAG, _RUNNER_VARIABLE = "--engine", "PACELINE_ENGINE"


@dataclass(frozen=True, slots=True)
class Specs:
    """Specs of one platform's processes; their ready files are in the folder `state`."""

    config: PlatformConfig
    state: Path
    redis_url: str

    def draft_store(self, index: int) -> ProcessSpec:
        """Return the spec of a replica of the draft store: drafts-0, drafts-1, ..."""
        name = f"drafts-{index}"
        flags = (
            f"--replica-id={name}",
            "--port=0",
            f"--budget-bytes={DRAFT_BYTES}",
            f"--snapshot-dir={self.config.snapshots.absolute()}",
            f"--snapshot-interval-seconds={SNAPSHOT_SECONDS}",
        )
        return self._spec(name, "drafts", (*flags, *self.config.draft_options))

    def service(self, name: str, options: Sequence[str]) -> ProcessSpec:
        """Return the spec of a service that needs only its options."""
        return self._spec(name, name, ("--port=0", *options))

    def learner(self, head: Path) -> ProcessSpec:
        """Return the spec of the online learner, which starts with the EAGLE-3 head `head`."""
        flags = (
            f"--model={self.config.model.absolute()}",
            f"--folder={self.config.drafters.absolute()}",
            f"--checkpoint={head.absolute()}",
            f"--threads={LEARNER_THREADS}",
        )
        return self.service("drafter", (*flags, *self.config.learner_options))

    def gateway(self, port: int, index: int = 0) -> ProcessSpec:
        """Return the spec of a gateway: gateway, gateway-1, ...; with port 0 it picks a free one."""
        tokens = self.config.tokens_file
        tokens_flag = [f"--tokens-file={tokens.absolute()}"] if tokens else []
        name = f"gateway-{index}" if index else "gateway"
        return self._spec(name, "gateway", (f"--port={port}", *tokens_flag, *self.config.gateway_options))

    def facade(self, port: int, gateways: str) -> ProcessSpec:
        """Return the spec of the HTTP facade of these gateways, with the model's tokenizer if there is one."""
        config = self.config
        tokens, texts = config.tokens_file, (config.model / "tokenizer_config.json").is_file()
        flags = [f"--port={port}", f"--gateway={gateways}"]
        flags += [f"--model={config.model.absolute()}"] if texts else []
        flags += [f"--tokens-file={tokens.absolute()}"] if tokens else []
        name = config.served_model_name
        flags += [f"--served-model-name={name}"] if name is not None else []
        return self._spec("facade", "facade", (*flags, *config.facade_options))

    def instance(
        self, index: int, environment: Mapping[str, str], cores: tuple[int, ...], head: Path | None = None
    ) -> ProcessSpec:
        """Return the spec of an instance: instance-0, instance-1, ...

        `environment` and `cores` are its share of the machine; `head` is the EAGLE-3 head that it starts with.
        """
        name = f"instance-{index}"
        adopted = self.config.adopted if self.config.shared_weights else self.config.adopted / name
        flags = [
            f"--model={self.config.model}",
            f"--instance-id={name}",
            f"--adopted-weights={adopted.absolute()}",
        ]
        if "VLLM_CPU_OMP_THREADS_BIND" in environment:
            flags.append(f"--threads-bind={environment['VLLM_CPU_OMP_THREADS_BIND']}")
        if "CUDA_VISIBLE_DEVICES" not in environment:
            flags.append(f"--kv-cache-memory-bytes={CPU_KV_BYTES}")
        if head is not None:
            flags.append(f"--eagle3={head.absolute()}")
        flags += self.config.instance_options  # the last of equal flags counts
        return self._spec(name, "generation", flags, environment, cores)

    def _spec(
        self,
        name: str,
        package: str,
        flags: Sequence[str],
        environment: Mapping[str, str] | None = None,
        cores: tuple[int, ...] = (),
    ) -> ProcessSpec:
        config, ready_file = self.config, self.state / f"{name}.ready.json"
        shared = (f"--redis-url={self.redis_url}", f"--ready-file={ready_file}")
        token = {"PACELINE_TOKEN": config.token} if config.token else {}  # not in the process list
        return ProcessSpec(
            name=name,
            argv=(sys.executable, "-m", f"services.{package}", *shared, *flags),
            log=config.logs / f"{name}.log",
            ready_file=ready_file,
            environment={
                "PYTHONUNBUFFERED": "1",
                **(environment or {}),
                **token,
                **_tls(config.tls),
                **config.environment,
            },
            cores=cores,
        )


def _tls(tls: Tls | None) -> dict[str, str]:
    if tls is None:
        return {}
    files = {name: getattr(tls, name) for name in ("ca_file", "cert_file", "key_file")}
    settings = {name: str(path.absolute()) for name, path in files.items() if path is not None}
    settings["client_auth"] = "true"
    if tls.server_name is not None:
        settings["server_name"] = tls.server_name
    return {f"PACELINE_TLS__{name.upper()}": value for name, value in settings.items()}


def first_drafter(model: Path, parent: Path) -> Path:
    """Return the folder of the first head under `parent`, and make it if it is missing; PlatformError on failure.

    A separate process makes it, so that this one does not load torch. An existing head is kept, since instances
    may already use it.
    """
    first = folder_of(parent.absolute(), 1)
    if first.is_dir():
        return first
    command = [sys.executable, "-m", "services.drafter.first", f"--model={model}", f"--parent={parent}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_HEAD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise PlatformError(f"no drafter for {model} was made in {_HEAD_SECONDS:.0f} s") from error
    if done.returncode:
        raise PlatformError(f"no drafter for {model} could be made.\n{done.stderr[-_HEAD_TAIL:]}")
    return Path(done.stdout.strip().splitlines()[-1])


class Forks:
    """Starts the processes of a `Platform`: as forks where possible, and by executing them otherwise."""

    def __init__(self, config: PlatformConfig) -> None:
        """Prepare two processes to fork from, without starting them."""
        environment, log = config.environment, config.logs / "imports.log"
        modules = [f"{name}.__main__" for name in _CONTROL]
        self._control = Zygote(*modules, environment=environment, log=log)
        self._instances = Zygote("services.generation.preload", environment=environment, log=log)
        self._closed = False

    def preload(self, specs: list[ProcessSpec]) -> None:
        """Start to import what these processes need; the folder of logs must exist."""
        for spec in specs:
            if is_forked(spec):
                # If this fails, `__call__` executes the process instead.
                with suppress(OSError):
                    self._zygote(spec).preload()

    def close(self) -> None:
        """Kill the forked processes that still run."""
        self._closed = True
        self._control.close()
        self._instances.close()

    def __call__(self, spec: ProcessSpec, log: BinaryIO) -> Process:
        """Start a process and send its output to a file."""
        if not is_forked(spec):
            return spawned(spec, log)
        # OpenMP's own default.
        threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
        try:
            return self._zygote(spec).fork(
                spec.argv, {**threads, **os.environ, **spec.environment}, spec.cores, log
            )
        except RuntimeError:
            if self._closed:
                raise
            # The zygote has written the reason to its log.
            return spawned(spec, log)

    def _zygote(self, spec: ProcessSpec) -> Zygote:
        return self._instances if spec.argv[2] == _INSTANCE else self._control


def is_forked(spec: ProcessSpec) -> bool:
    """Return True if a process may be forked; all others are executed.

    Not forked are instances on GPUs, since a process must not be forked after CUDA is initialized; instances on
    vLLM's V2 runner, which is chosen before vLLM is imported; processes that are no services; and, on systems other
    than Linux, all processes.
    """
    if sys.platform != "linux" or list(spec.argv[:2]) != [sys.executable, "-m"]:
        return False
    module, *flags = spec.argv[2:]
    return module in _CONTROL or (
        module == _INSTANCE and "CUDA_VISIBLE_DEVICES" not in spec.environment and _runner(spec, flags) != V2
    )


def _runner(spec: ProcessSpec, flags: list[str]) -> str:
    """Return the runner that an instance is configured to use; the last of equal flags counts."""
    runner = spec.environment.get(_RUNNER_VARIABLE, os.environ.get(_RUNNER_VARIABLE, ""))
    for place, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if name == _RUNNER_FLAG:
            runner = value if equals else "".join(flags[place + 1 : place + 2])
    return runner
