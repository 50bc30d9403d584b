"""Model the rollout times that the engine steps of a cell would have on devices that are not available.

Every instance logs the shape of each of its steps: samples, tokens with drafts and prompts, context. The table of a
device (services/simulator/device_tables.py) gives the time of each step on the device. The slowest instance's sum
is the rollout's time. Instances count the passes of draft models, and the model's table gives their cost.

Tables are measured where services/simulator/measured has one of the device's name, otherwise made from data sheets.
By a data sheet a time is a band. Its optimistic end is the table. At its pessimistic end steps that verify drafts
take longer by the factor that published steps have, and the device waits for the host between two steps
(bench/simulate/verification.py), except in stock vLLM without drafts, which schedules ahead. A measured table
includes both, so the ends are equal.

Left out is everything that is not an engine step: messages, and weights. Contexts are the subject's contexts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from bench.scrape import Metrics
from bench.simulate.verification import fitted
from examples.tinymath.spans import SampleSpan
from services.generation.engine.step_log import LoggedStep
from services.generation.engine.types import EAGLE3, QUANTIZED
from services.simulator.device_tables import (
    DATA_SHEET,
    EAGLE3_8B,
    EAGLE3_70B,
    H100,
    LLAMA_70B,
    MEASURED,
    QWEN3_8B,
    DeviceTable,
    ModelSizes,
    decoding_table,
    known_devices,
    swept,
)
from services.step_time.sweep import SavedSweep, SweepSubject

H100_8B, H100_70B = "8B H100", "70B 8xH100"
_MAX_SAMPLES = 256
# Bytes of a weight of the 4-bit copy with the scale that 128 of them share, times the overhead of the kernels.
_W4_BYTES = (0.5 + 2 / 128) * 1.25


@dataclass(frozen=True, slots=True)
class ModelledDevice:
    """Step times of a model on a device, and of its draft models' passes by drafter."""

    steps: DeviceTable
    """Optimistic step times, without what verification and the host cost; measured where a table was measured."""
    pessimistic: DeviceTable
    """Step times with both; the same table if it was measured."""
    passes: Mapping[str, DeviceTable]

    @classmethod
    def of(cls, steps: DeviceTable, model: ModelSizes, head: ModelSizes, devices: int) -> ModelledDevice:
        """Return the tables of a model on `devices` H100 with these step times."""
        copy = decoding_table(f"{steps.name} W4", model, H100, devices, _W4_BYTES)
        passes = {QUANTIZED: copy, EAGLE3: decoding_table(f"{steps.name} EAGLE-3", head, H100, devices)}
        return cls(steps, fitted().on(steps) if steps.source == DATA_SHEET else steps, passes)


def modelled_devices(measured: Path = MEASURED) -> dict[str, ModelledDevice]:
    """Return the devices by name, with measured tables from a folder where it has them.

    Raises:
        ValueError: a file of the folder is no table.
    """
    known = {table.name: table for table in known_devices(measured)}
    return {
        H100_8B: ModelledDevice.of(known[H100_8B], QWEN3_8B, EAGLE3_8B, 1),
        H100_70B: ModelledDevice.of(known[H100_70B], LLAMA_70B, EAGLE3_70B, 8),
    }


DEVICES: Mapping[str, ModelledDevice] = modelled_devices()


@dataclass(frozen=True, slots=True)
class InstanceWork:
    """Engine steps of an instance for a step of the run and for later ones, and its draft models' passes."""

    steps: Sequence[LoggedStep]
    ahead: Sequence[LoggedStep] = ()
    passes: Mapping[str, DraftPasses] = field(default_factory=dict)


class DraftPasses(NamedTuple):
    """Number of a draft model's passes, and the tokens that they drafted together."""

    passes: float
    tokens: float


@dataclass(frozen=True, slots=True)
class ModelledStep:
    """Modelled seconds of a step of the run on a device."""

    rollout: float
    """Seconds of the slowest instance."""
    idle: float
    """Seconds in which an instance had no work of the step left, mean over the instances."""
    ahead: float
    """Seconds of generating for later steps, in idle and update time, mean over the instances."""
    pessimistic: float | None = None
    """Seconds of the slowest instance at the pessimistic end; None in figures from before there was one."""
    passes: float = 0.0
    """Seconds of draft models' passes, mean over the instances."""


class StepReader:
    """Read an instance's log part by part."""

    def __init__(self, path: Path) -> None:
        self._path, self._place = path, 0

    def since(self) -> list[LoggedStep]:
        """Return the steps since the last call. OSError without a log."""
        with self._path.open("rb") as file:
            file.seek(self._place)
            whole, _, _ = file.read().rpartition(b"\n")
        self._place += len(whole) + bool(whole)
        return [LoggedStep.of_line(line) for line in whole.decode().splitlines()]


def divided(steps: Iterable[LoggedStep], spans: Iterable[SampleSpan], begin: float) -> InstanceWork:
    """Return the steps within the spans of an instance's samples, relative to `begin`, and the other steps."""
    spans = list(spans)
    own: list[LoggedStep] = []
    ahead: list[LoggedStep] = []
    for step in steps:
        at = step.at - begin
        (own if any(span.begin <= at <= span.end for span in spans) else ahead).append(step)
    return InstanceWork(own, ahead)


def passes_of(metrics: Metrics) -> dict[str, DraftPasses]:
    """Return the passes of an instance's draft models, by drafter, from its counters."""
    found = {
        name: DraftPasses(
            metrics[f"paceline_{name}_draft_steps_total"], metrics[f"paceline_{name}_draft_tokens_total"]
        )
        for name in (QUANTIZED, EAGLE3)
    }
    return {name: counted for name, counted in found.items() if counted.passes}


def modelled(work: Sequence[InstanceWork], *, host_hidden: bool = False) -> dict[str, ModelledStep]:
    """Return the modelled times of a step of the run from the work of its instances, by device.

    `host_hidden` is true for an engine that schedules a step while the device computes the previous one.
    """
    return {name: _on(device, work, host_hidden) for name, device in DEVICES.items()}


def _on(device: ModelledDevice, work: Sequence[InstanceWork], host_hidden: bool) -> ModelledStep:
    slow = replace(device.pessimistic, host=0.0) if host_hidden else device.pessimistic
    passes = [_drafting(device, each) for each in work]
    own, slowest = (
        [_seconds(table, each.steps) + more for each, more in zip(work, passes, strict=True)]
        for table in (device.steps, slow)
    )
    rollout = max(own)
    return ModelledStep(
        rollout,
        fmean(rollout - each for each in own),
        fmean(_seconds(device.steps, each.ahead) for each in work),
        max(slowest),
        fmean(passes),
    )


def _seconds(table: DeviceTable, steps: Iterable[LoggedStep]) -> float:
    return sum(
        table.seconds(step.samples, step.rows, step.context, verifies=step.drafted > 0) for step in steps
    )


def _drafting(device: ModelledDevice, work: InstanceWork) -> float:
    """Return the time of the draft models' passes, with the mean number of samples and their mean context."""
    samples = sum(step.samples for step in work.steps)
    context = sum(step.context for step in work.steps) / samples if samples else 0.0
    seconds = 0.0
    for name, counted in work.passes.items():
        together = max(1, round(counted.tokens / counted.passes))
        seconds += counted.passes * device.passes[name].seconds(together, together, together * context)
    return seconds


def assumed_sweep(name: str, folder: Path) -> Path:
    """Write the noiseless sweep that an instance on a device would measure at its start; return the file."""
    table = DEVICES[name].steps
    subject = SweepSubject(
        device=f"{name} by {table.source}", tensor_parallel_size=1, model=name, dtype="bfloat16"
    )
    steps = tuple(swept(table, _MAX_SAMPLES, noise=0.0))
    return SavedSweep(subject=subject, steps=steps).save(folder)
