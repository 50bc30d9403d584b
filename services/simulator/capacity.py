"""Find the number of instances with which a step meets a deadline, by simulating steps. Deterministic."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import TextIO

from services.simulator.cluster_simulation import ClusterSimulation
from services.simulator.modelled_instance import SimulatedStep
from services.simulator.simulation_setup import SimulationSetup

OnEnd = Callable[[int, int], None]
# The answer is at most this share above the fewest instances.
_CLOSE = 0.01
# Seconds between two lines of progress.
_EVERY = 10.0


class SimulationProgress:
    """Prints a line of progress to stderr every ten seconds. `samples`: expected total of all steps; 0: unknown."""

    def __init__(
        self, samples: int, clock: Callable[[], float] = time.monotonic, out: TextIO | None = None
    ) -> None:
        self._expected = samples
        self._clock = clock
        self._out = sys.stderr if out is None else out
        self._began = self._shown = clock()
        self._ended = 0

    def __call__(self, ended: int, left: int) -> None:
        """Count `ended` more samples."""
        self._ended += ended
        now = self._clock()
        if now - self._shown < _EVERY:
            return
        self._shown, took = now, now - self._began
        line = f"{self._ended:,} samples simulated in {took:.0f} s"
        if self._expected > self._ended:
            line += f", about {took / self._ended * (self._expected - self._ended):.0f} s left"
        print(line, file=self._out, flush=True)


@dataclass(frozen=True, slots=True)
class CapacityAnswer:
    """Fewest instances that meet a deadline (seconds), None if even the most do not; and the simulated steps."""

    deadline: float
    instances: int | None
    tried: dict[int, SimulatedStep] = field(default_factory=dict)


def last_step(setup: SimulationSetup, on_end: OnEnd = lambda ended, left: None) -> SimulatedStep:
    """Return the last step of a run, which has drafts from the earlier steps."""
    *_, last = ClusterSimulation(setup, on_end).run()
    return last


def instances_for(
    setup: SimulationSetup,
    deadline: float,
    least: int = 8,
    most: int = 4096,
    on_end: OnEnd = lambda ended, left: None,
) -> CapacityAnswer:
    """Return the fewest instances from `least` to `most` whose step is done by the deadline, to one percent.

    Assumes that more instances are no slower, which holds except for chance in the placement of samples.

    Raises:
        ValueError: `least` is below 1 or above `most`, or the deadline is not above 0.
    """
    if not 1 <= least <= most:
        raise ValueError(f"least must be from 1 to most ({most}), not {least}")
    if not deadline > 0:
        raise ValueError(f"deadline must be above 0 seconds, not {deadline}")
    tried: dict[int, SimulatedStep] = {}

    def meets(instances: int) -> bool:
        tried[instances] = last_step(replace(setup, instances=instances), on_end)
        return tried[instances].seconds <= deadline

    if not meets(most):
        return CapacityAnswer(deadline, None, tried)
    if least == most or meets(least):
        return CapacityAnswer(deadline, least, tried)
    too_few, enough = least, most
    while enough - too_few > max(1, int(_CLOSE * too_few)):
        middle = min(max(round(sqrt(too_few * enough)), too_few + 1), enough - 1)
        if meets(middle):
            enough = middle
        else:
            too_few = middle
    return CapacityAnswer(deadline, enough, tried)
