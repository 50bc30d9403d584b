"""List the quick form of every benchmark, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

NIGHT_MINUTES = 67
"""Time for all benchmarks together, on two cores."""


@dataclass(frozen=True, slots=True)
class NightlyJob:
    """A benchmark: its module, its options, and the minutes after which it is ended.

    It writes runs/bench/`name`.json.
    """

    name: str
    module: str
    minutes: float
    options: tuple[str, ...] = ()
    arctic: bool = False
    """Compare with arctic-inference, which `scripts/arctic` builds."""

    @property
    def command(self) -> str:
        """Return the command with which a reader gets the same figures."""
        return " ".join(("python -m", self.module, *self.options))


LONGER = ("axes.recorded", "rollout.smollm2", "device_clock", "precision", "host_step", "gpu")
"""Benchmarks that do not fit in a night, or need a GPU; they are run and published by hand."""
JOBS = (
    NightlyJob("rollout", "bench.rollout", 26.0, ("--minutes", "24")),
    NightlyJob("gateway", "bench.gateway", 2.0, ("--rounds", "7")),
    NightlyJob("facade", "bench.facade", 3.0, ("--rounds", "6")),
    NightlyJob("fleet", "bench.fleet", 3.0, ("--instances", "125,250")),
    NightlyJob("weights", "bench.weights", 4.0, ("--sizes", "100", "--fleets", "1,2")),
    NightlyJob("coupled", "bench.coupled", 4.0, ("--rounds", "2"), arctic=True),
    NightlyJob(
        "policy", "bench.policy", 5.0, ("--rounds", "6", "--samples", "8,32", "--wrong", "0.02,0.4,0.95")
    ),
    NightlyJob("policy.simulated", "bench.policy.simulated", 3.0),
    NightlyJob("axes", "bench.axes", 4.0),
    NightlyJob("migration", "bench.migration", 4.0, ("--rounds", "1", "--tail-rounds", "3")),
    NightlyJob("learner", "bench.learner", 4.0, ("--steps", "8", "--warm-up-seconds", "10")),
    NightlyJob("simulate", "bench.simulate", 3.0),
    NightlyJob("simulate.replays", "bench.simulate.replays", 2.0),
)
