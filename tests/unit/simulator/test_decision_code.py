"""Decisions of a simulation are made by the services: when theirs change, so does what is simulated."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import services.simulator
from services.bubbles import plan as bubble_plan
from services.bubbles.config import BubblesConfig
from services.contracts.knobs import Knobs
from services.gateway.scheduler import placement
from services.generation.speculation import modes
from services.reallocator.config import ReallocatorConfig
from services.simulator import cluster_simulation, step_decider
from services.simulator.cluster_simulation import ClusterSimulation
from services.simulator.device_tables import H100, QWEN3_8B, decoding_table
from services.simulator.simulation_setup import (
    PREGENERATED,
    LogNormalLengths,
    SimulatedSource,
    SimulatedWorkload,
    SimulationSetup,
)

SETUP = SimulationSetup(
    decoding_table("8B H100", QWEN3_8B, H100),
    3,
    SimulatedWorkload(LogNormalLengths(300, 0.9, 4000), 8, 8),
    steps=2,
    sources=(SimulatedSource("suffix", 0.6),),
    pregenerated=SimulatedSource(PREGENERATED, 0.9),
    bubbles=BubblesConfig.model_construct(),
    reallocation=ReallocatorConfig.model_construct(decision_steps=8, poll_seconds=0.01),
)


class Asked(Exception):
    """The service's own code was called."""


def _ask(*_: object, **__: object) -> None:
    raise Asked


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (placement.InstancePool, "choose"),
        (modes.PlannerMode, "choose"),
        (bubble_plan.PregenerationPlan, "answer"),
        (cluster_simulation, "plan"),
    ],
)
def test_each_service_decides_for_itself(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    monkeypatch.setattr(owner, name, _ask)
    with pytest.raises(Asked):
        list(ClusterSimulation(SETUP).run())


def test_the_names_are_the_services_own() -> None:
    assert cluster_simulation.plan.__module__ == "services.reallocator.planning.plan"
    assert cluster_simulation.InstancePool.__module__ == "services.gateway.scheduler.placement"
    assert cluster_simulation.WaitingQueue.__module__ == "services.gateway.scheduler.placement"
    assert step_decider.KnobDrivenPlanner.__module__ == "services.generation.speculation.planner"


def test_every_mode_can_be_simulated() -> None:
    for mode in ("planner", "toggle", "solver", "adaptive", "fixed"):
        setup = SimulationSetup(
            SETUP.device, 2, SETUP.workload, sources=SETUP.sources, knobs=Knobs(mode=mode)
        )
        assert next(ClusterSimulation(setup).run()).acceptance_length > 1, mode


def test_the_simulation_asks_no_clock_and_no_network() -> None:
    folder = Path(services.simulator.__file__).parent
    # Command line, and the progress that it shows.
    outside = {"command.py", "capacity.py"}
    for path in folder.glob("*.py"):
        tree = ast.parse(path.read_text())
        modules = {each.module for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)}
        modules |= {
            name.name for each in ast.walk(tree) if isinstance(each, ast.Import) for name in each.names
        }
        found = {(name or "").partition(".")[0] for name in modules}
        assert path.name in outside or not found & {"time", "random", "grpc", "redis", "asyncio"} - _allowed(
            path
        )


def _allowed(path: Path) -> set[str]:
    # Noise of the sweep, from a seed.
    return {"random"} if path.name == "device_tables.py" else set()
