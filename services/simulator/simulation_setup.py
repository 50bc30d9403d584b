"""Setup of a simulation: the cluster, its settings, and the work."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.bubbles.config import BubblesConfig
from services.contracts.knobs import Knobs
from services.reallocator.config import ReallocatorConfig
from services.simulator.device_tables import DeviceTable
from services.simulator.simulated_source import SimulatedSource
from services.simulator.workload import SimulatedWorkload


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """A cluster and what it does. Times are in seconds.

    `bubbles` and `reallocation` None: not at all. `foreseen`: the gateway has seen the prompts in an earlier epoch.
    `room_factor`, `affinity_slack` and `draft_cost` are the gateway's. `kv_seconds` is the time to send the KV of a
    token from one instance to another, while the sample decodes.
    """

    device: DeviceTable
    instances: int
    workload: SimulatedWorkload
    steps: int = 1
    knobs: Knobs = field(default_factory=Knobs)
    sources: tuple[SimulatedSource, ...] = ()
    pregenerated: SimulatedSource | None = None
    bubbles: BubblesConfig | None = None
    reallocation: ReallocatorConfig | None = None
    update_seconds: float = 0.0
    max_running: int = 256
    foreseen: bool = True
    room_factor: float = 1.25
    affinity_slack: float = 1.0
    draft_cost: float = 0.15
    kv_seconds: float = 3e-6
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("instances", "steps", "max_running"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.update_seconds >= 0:
            raise ValueError(f"update_seconds must not be negative, as {self.update_seconds} is")

    @property
    def samples(self) -> int:
        """Samples of all steps together."""
        return self.steps * self.workload.prompts * self.workload.samples
