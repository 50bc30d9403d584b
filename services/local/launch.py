"""Command lines of the platform's processes, and their launch as forks.

`Specs` has the command lines. `Forks` starts a process as a fork of one that has imported its modules already, or
anew where a fork is not possible. `first_drafter` makes the EAGLE-3 head that a learner begins with.
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
from services.local.child import ChildSpec, PlatformError, Process, spawned
from services.local.config import PlatformConfig
from services.local.zygote import Zygote

CPU_KV_BYTES = 1 << 30
"""KV memory of an instance on CPU, where vLLM would take all that is free."""
DRAFT_BYTES = 256 << 20
"""Memory of a draft store: some 30 million tokens, plenty for a model that one machine trains."""
LEARNER_THREADS = 1
"""Threads of the learner, which yields to the instances on the cores that it shares with them."""
SNAPSHOT_SECONDS = 10
"""Interval of a draft store's snapshots."""


@dataclass(frozen=True, slots=True)
class Specs:
    """Specs of one platform's processes; their ready files lie in `state`."""

    config: PlatformConfig
    state: Path
    redis_url: str

    def draft_store(self, index: int) -> ChildSpec:
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

    def service(self, name: str, options: Sequence[str]) -> ChildSpec:
        """Return the spec of a service that needs no more than its options."""
        return self._spec(name, name, ("--port=0", *options))

    def learner(self, head: Path) -> ChildSpec:
        """Return the spec of the online learner, which begins with an EAGLE-3 head."""
        flags = (
            f"--model={self.config.model.absolute()}",
            f"--folder={self.config.drafters.absolute()}",
            f"--checkpoint={head.absolute()}",
            f"--threads={LEARNER_THREADS}",
        )
        return self.service("drafter", (*flags, *self.config.learner_options))

    def gateway(self, port: int, index: int = 0) -> ChildSpec:
        """Return the spec of a gateway on a port, 0 lets it pick one: gateway, gateway-1, ..."""
        tokens = self.config.tokens_file
        given = [f"--tokens-file={tokens.absolute()}"] if tokens else []
        name = f"gateway-{index}" if index else "gateway"
        return self._spec(name, "gateway", (f"--port={port}", *given, *self.config.gateway_options))

    def facade(self, port: int, gateways: str) -> ChildSpec:
        """Return the spec of the HTTP facade of gateways; it has the model's tokenizer if there is one."""
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
    ) -> ChildSpec:
        """Return the spec of an instance: instance-0, instance-1, ...

        `environment` and `cores` give it its share of the machine; `head` is the EAGLE-3 head that it begins with.
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
    ) -> ChildSpec:
        config, ready_file = self.config, self.state / f"{name}.ready.json"
        shared = (f"--redis-url={self.redis_url}", f"--ready-file={ready_file}")
        token = {"PACELINE_TOKEN": config.token} if config.token else {}  # not in the process list
        return ChildSpec(
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


_HEAD_SECONDS = 600.0
_HEAD_TAIL = 2000


def first_drafter(model: Path, parent: Path) -> Path:
    """Return the folder of the first head under `parent`; makes it if there is none. PlatformError if that fails.

    It is made in a process of its own, so that this one does not load torch. An existing one is kept, since
    instances may already use it.
    """
    made = folder_of(parent.absolute(), 1)
    if made.is_dir():
        return made
    command = [sys.executable, "-m", "services.drafter.first", f"--model={model}", f"--parent={parent}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_HEAD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise PlatformError(f"no drafter for {model} was made in {_HEAD_SECONDS:.0f} s") from error
    if done.returncode:
        raise PlatformError(f"no drafter for {model} could be made.\n{done.stderr[-_HEAD_TAIL:]}")
    return Path(done.stdout.strip().splitlines()[-1])


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
