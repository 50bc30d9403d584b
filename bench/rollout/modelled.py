"""Model the rollout times that the engine steps of a cell would have on devices that are not available.

Every instance logs the shape of each of its steps: samples, tokens with drafts and prompts, context. The table of a
device (services/simulator/device_tables.py, from data sheets) gives the time of each step on the device. The
slowest instance's sum is the rollout's time. Instances count the passes of draft models, and the model's table
gives their cost. Left out is everything that is not an engine step: work of the host beyond vLLM's own, which the
tables include (suffix index, planner, services), messages, and weights. Contexts are the small subject's contexts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from bench.scrape import Metrics
from examples.tinymath.spans import SampleSpan
from services.generation.engine.step_log import LoggedStep
from services.generation.engine.types import EAGLE3, QUANTIZED
from services.simulator.device_tables import (
    EAGLE3_8B,
    EAGLE3_70B,
    H100,
    LLAMA_70B,
    QWEN3_8B,
    DeviceTable,
    ModelSizes,
    decoding_table,
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
    passes: Mapping[str, DeviceTable]

    @classmethod
    def of(cls, name: str, model: ModelSizes, head: ModelSizes, devices: int) -> ModelledDevice:
        """Return the tables of a model on `devices` H100."""
        copy = decoding_table(f"{name} W4", model, H100, devices, _W4_BYTES)
        passes = {QUANTIZED: copy, EAGLE3: decoding_table(f"{name} EAGLE-3", head, H100, devices)}
        return cls(decoding_table(name, model, H100, devices), passes)


DEVICES: Mapping[str, ModelledDevice] = {
    H100_8B: ModelledDevice.of(H100_8B, QWEN3_8B, EAGLE3_8B, 1),
    H100_70B: ModelledDevice.of(H100_70B, LLAMA_70B, EAGLE3_70B, 8),
}


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


def modelled(work: Sequence[InstanceWork]) -> dict[str, ModelledStep]:
    """Return the modelled times of a step of the run from the work of its instances, by device."""
    return {name: _on(device, work) for name, device in DEVICES.items()}


def _on(device: ModelledDevice, work: Sequence[InstanceWork]) -> ModelledStep:
    own = [_seconds(device.steps, each.steps) + _drafting(device, each) for each in work]
    rollout = max(own)
    return ModelledStep(
        rollout,
        fmean(rollout - each for each in own),
        fmean(_seconds(device.steps, each.ahead) for each in work),
    )


def _seconds(table: DeviceTable, steps: Iterable[LoggedStep]) -> float:
    return sum(table.seconds(step.samples, step.rows, step.context) for step in steps)


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
    subject = SweepSubject(
        device=f"{name} by data sheets", tensor_parallel_size=1, model=name, dtype="bfloat16"
    )
    steps = tuple(swept(DEVICES[name].steps, _MAX_SAMPLES, noise=0.0))
    return SavedSweep(subject=subject, steps=steps).save(folder)
