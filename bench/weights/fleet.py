"""Push weights to fleets of one model, on a platform with a real gateway, Redis and instances.

Instances are `bench.weights.instance`. Each has its own folder, as on separate hosts.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from bench.report import cores, say
from bench.scrape import metrics_at
from bench.weights.instance import COPYING, ENGINE, TIMES, VLLM
from bench.weights.links import LINK_HOST, ThrottledLinks, free_ports
from bench.weights.memory import PeakMemory
from bench.weights.models import LENGTH, Reference, weight_bytes
from bench.weights.summary import FOLDER, LOOPBACK, THROTTLED, Pauses, pauses
from bench.weights.summary import parse as parse_times
from bench.weights.trainer import Push, TrainerProcess
from paceline import Group, InFlight, SamplingParams
from services.local import Platform, PlatformConfig
from services.local.child import Process, ProcessSpec, spawned

_RECEIVED = 'paceline_generation_weight_stream_received_bytes_total{{peer="{}"}}'
_KV_BYTES = 256 << 20
_SAMPLES = 8
_PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
_DECODING_SECONDS = 120.0
_STEPS_BEFORE, _STEPS_AFTER = 20, 5


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the benchmark and the baselines of its updates."""

    megabytes: int
    folder: Path
    reference: Reference

    @property
    def bytes(self) -> int:
        """Bytes of its weights."""
        return weight_bytes(self.folder)


@dataclass(frozen=True, slots=True)
class Pushes:
    """Pushes to measure: the fleets, largest first, the transports, and the number of pushes of each."""

    fleets: Sequence[int]
    transports: Sequence[str]
    rounds: int


def transfers(model: Model, folder: Path, pushes: Pushes, links: float | None) -> Iterator[dict[str, Any]]:
    """Yield a row for each fleet and transport. `links` is the rate of each link in bytes a second; None: loopback.

    Engines are `CopyingEngine`. The first push of each kind is not timed; it measures memory.
    """
    ports = free_ports(max(pushes.fleets))
    with (
        nullcontext() if links is None else ThrottledLinks(ports, links) as gates,
        _platform(model, folder, COPYING, ports, throttled=gates is not None) as platform,
        TrainerProcess(platform.gateway_address, model.folder, folder / "versions") as trainer,
    ):
        for fleet in pushes.fleets:
            for left in platform.instances[fleet:]:
                if left.alive:
                    platform.remove(left.spec.name)
                    shutil.rmtree(platform.config.adopted / left.spec.name, ignore_errors=True)
            for transport in pushes.transports:
                yield _transfer(model, platform, trainer, gates, transport, fleet, pushes.rounds)


def engine_pushes(model: Model, folder: Path, transports: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield a row for each transport: pushes to one instance of vLLM's engine, which decodes meanwhile."""
    ports = free_ports(1)
    with (
        _platform(model, folder, VLLM, ports, throttled=False) as platform,
        TrainerProcess(platform.gateway_address, model.folder, folder / "versions") as trainer,
        platform.client() as client,
    ):
        times = folder / "times"
        for number, transport in enumerate(transports):
            run = client.run(f"decoding-{number}", seed=number)
            sampling = SamplingParams(max_tokens=LENGTH - 64, ignore_eos=True)
            rollout = run.rollout(0, [Group("prompt", _PROMPT, _SAMPLES)], sampling)
            _wait_for_steps(times, _STEPS_BEFORE)
            pids = {"instance": platform.instances[0].pid, "trainer": trainer.pid}
            with PeakMemory(pids) as memory:
                pushed = trainer.push(transport, InFlight.CONTINUE)
            _wait_for_steps(times, _STEPS_AFTER)
            rollout.cancel()
            found = pauses(parse_times(_lines(times)), pushed.began, pushed.ended)
            yield _engine_row(model, transport, pushed, found, memory)


def _engine_row(
    model: Model, transport: str, pushed: Push, found: Pauses, memory: PeakMemory
) -> dict[str, Any]:
    return {
        "transport": transport,
        "megabytes": model.megabytes,
        "engine": VLLM,
        "seconds": pushed.seconds,
        "stage_seconds": pushed.stage_seconds,
        "decoding_gap_ms": found.gap,
        "memory_copy_ms": 1000 * model.reference.memory_copy,
        "apply_ms": found.apply,
        "prefill_ms": found.prefill,
        "step_ms": found.usual_step,
        "step_while_staging_ms": found.step_while_staging,
        "slowest_step_ms": found.slowest_step,
        "usual_gap_ms": found.usual_gap,
        "serving_private_mb": memory.before["instance"] / 1e6,
        "peak_private_mb": memory.peak["instance"] / 1e6,
        "peak_memory_models": memory.growth("instance") / model.bytes,
        "trainer_peak_memory_models": memory.growth("trainer") / model.bytes,
    }


def _transfer(
    model: Model,
    platform: Platform,
    trainer: TrainerProcess,
    gates: ThrottledLinks | None,
    transport: str,
    fleet: int,
    rounds: int,
) -> dict[str, Any]:
    children = platform.instances[:fleet]
    pids = {each.spec.name: each.pid for each in children} | {"trainer": trainer.pid}
    with PeakMemory(pids) as memory:
        _checked(trainer.push(transport), fleet)
    received, passed = _received(platform, fleet), _passed(gates)
    timed = []
    for _ in range(rounds):
        os.sync()
        timed.append(_checked(trainer.push(transport), fleet))
    received = {peer: (now - received[peer]) / rounds for peer, now in _received(platform, fleet).items()}
    sent = (_passed(gates) - passed) / rounds
    seconds = statistics.median(each.seconds for each in timed)
    own = model.reference
    return {
        "transport": transport,
        "links": LOOPBACK if gates is None else THROTTLED,
        "megabytes": model.megabytes,
        "instances": fleet,
        "engine": COPYING,
        "seconds": seconds,
        "seconds_of_rounds": [each.seconds for each in timed],
        "stage_seconds": statistics.median(each.stage_seconds for each in timed),
        "apply_seconds": statistics.median(each.apply_seconds for each in timed),
        "copy_seconds": own.copy,
        "check_seconds": own.check,
        "vs_copy_and_check": seconds / (own.copy + own.check),
        "model_bytes": model.bytes,
        # With links, the bytes that passed to the instances, acknowledgements included; else their own counts.
        "trainer_bytes": model.bytes if transport == FOLDER else (sent if gates else received["trainer"]),
        "received_from_trainer_bytes": received["trainer"],
        "received_from_instances_bytes": received["instance"],
        "trainer_peak_private_mb": memory.peak["trainer"] / 1e6,
        "trainer_peak_memory_models": memory.growth("trainer") / model.bytes,
        "instance_peak_private_mb": max(memory.peak[each.spec.name] for each in children) / 1e6,
        "instance_peak_memory_models": max(memory.growth(each.spec.name) for each in children) / model.bytes,
    }


def _checked(pushed: Push, fleet: int) -> Push:
    if pushed.instances != fleet:
        raise RuntimeError(f"{pushed.instances} of {fleet} instances took part in the push")
    return pushed


def _received(platform: Platform, fleet: int) -> dict[str, float]:
    """Return the bytes that the instances have counted, by sender."""
    found = {"trainer": 0.0, "instance": 0.0}
    for child in platform.instances[:fleet]:
        assert child.ready is not None
        values = metrics_at(child.ready.metrics_port, platform.config.token)
        for peer in found:
            found[peer] += values[_RECEIVED.format(peer)]
    return found


def _passed(gates: ThrottledLinks | None) -> int:
    return 0 if gates is None else sum(each.inbound for each in gates.passed())


@contextmanager
def _platform(
    model: Model, folder: Path, engine: str, ports: Sequence[int], *, throttled: bool
) -> Iterator[Platform]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def launch(spec: ProcessSpec, log: BinaryIO) -> Process:
        name, _, number = spec.name.partition("-")
        if name != "instance":
            return spawned(spec, log)
        argv = ["bench.weights.instance" if each == "services.generation" else each for each in spec.argv]
        argv.append(f"--port={ports[int(number)]}")
        if throttled:
            argv.append(f"--advertise-host={LINK_HOST}")
        return spawned(replace(spec, argv=argv), log)

    config = PlatformConfig(
        model=model.folder,
        instances=len(ports),
        folder=folder,
        instance_options=_instance_options(engine),
        shared_weights=False,
        draft_stores=0,
        bubbles=False,
        policy=False,
        reallocator=False,
        environment={ENGINE: engine, TIMES: str((folder / "times").absolute()), "OMP_NUM_THREADS": "1"},
        pin=False,
    )
    try:
        with Platform(config, launch=launch, report=say) as platform:
            yield platform
    finally:
        for each in "adopted", "versions":
            shutil.rmtree(folder / each, ignore_errors=True)


def _instance_options(engine: str) -> tuple[str, ...]:
    options = ("--speculation=off", "--no-drafts")
    if engine == COPYING:
        return options
    # The engine computes on one core. The other is for the trainer, and for the other work of an instance.
    bound = f"--threads-bind={cores()[-1]}"
    return (*options, "--dtype=float32", f"--kv-cache-memory-bytes={_KV_BYTES}", bound)


def _lines(times: Path) -> list[str]:
    return times.read_text().splitlines(keepends=True) if times.exists() else []


def _wait_for_steps(times: Path, count: int) -> None:
    """Wait until the engine has made `count` more steps."""
    before, deadline = len(_lines(times)), time.monotonic() + _DECODING_SECONDS
    while len(_lines(times)) < before + count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the engine made no {count} steps in {_DECODING_SECONDS:.0f} s")
        time.sleep(0.05)
