"""A step of a run, the names of steps that others ask for, and how long steps take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.gpu.host import WorkerSetup
from bench.gpu.state import State

Arguments = dict[str, Any]
ENVIRONMENT = "environment"
KERNELS = "kernels: "
"""Before the names of the kernels' steps."""
CEILINGS, SWEEP, TUNED_CHECKS = f"{KERNELS}ceilings", f"{KERNELS}sweep: ", f"{KERNELS}exact, tuned: "


@dataclass(frozen=True, slots=True)
class GpuStep:
    """A step: the process that does it, the order, and about how many seconds it takes.

    `arguments` are the order's; `more` adds those that come of earlier steps. LookupError: one of these failed.
    """

    name: str
    setup: WorkerSetup
    order: str
    seconds: float
    arguments: Arguments = field(default_factory=dict)
    more: Callable[[State], Arguments] = field(default=lambda _: {})
    brief: bool = False


def estimated(step: GpuStep, *, starts: bool) -> float:
    """Return the seconds that a step is estimated to take, with the start of its process if it `starts`."""
    return step.seconds + (step.setup.start_seconds if starts else 0)


def left(state: State, steps: Sequence[GpuStep]) -> float:
    """Return the estimated seconds of the steps that are left, corrected by how long the others took."""
    seconds = _by_name(steps)
    took = sum(state.done[name]["seconds"] for name in seconds if name in state.done)
    planned = sum(own for name, own in seconds.items() if name in state.done)
    rate = took / planned if planned else 1.0
    return rate * sum(own for name, own in seconds.items() if not state.over(name))


def total(steps: Sequence[GpuStep]) -> float:
    """Return the estimated seconds of a whole run, starts included."""
    return sum(_by_name(steps).values())


def _by_name(steps: Sequence[GpuStep]) -> dict[str, float]:
    befores = [None, *(step.setup for step in steps)]
    return {
        step.name: estimated(step, starts=step.setup != before)
        for step, before in zip(steps, befores, strict=False)
    }


def tokens_name(setup: Any, way: str) -> str:
    """Return the name of the step in which an engine generates tokens: plainly, with drafts or with trees."""
    return f"tokens: {setup.kind}, {setup.dtype}, {way}"
