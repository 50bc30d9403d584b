"""RLHFSpec, Figures 5 and 13: Llama-3.1-8B on L40S with an EAGLE draft model, LMSYS lengths.

Figure 5 is two instances of 24 samples and 1, from which samples are moved; Figure 13 is a generation stage as
methods are added. A tree is simulated as a draft in whose order its nodes are picked, the likeliest first:
verifying n nodes brings the sum of their weights (the paper's section 5.2), which fall by the same factor from
one to the next. The draft model makes 5 passes in every step, whatever is verified. One number of each figure
is fitted, that factor: by the throughput of the single sample in Figure 5, and by the gain of static
speculation in Figure 13.

The paper leaves open how many tokens static speculation verifies (assumed: 24 tokens, about the middle of the 2
to 48 that it tries), how many instances and samples the breakdown has (assumed: 8 and 64, the most of its Table
1), and how long the samples of Figure 5 are (assumed: 600 tokens). The number of verified tokens was chosen
with the larger batches of Figure 5 in view, so it counts as fitted, too; what others give is simulated beside
it.
"""

from __future__ import annotations

from dataclasses import replace
from math import log
from statistics import fmean

import numpy as np

from bench.simulate.replay import ReplayedCell, solved
from services.contracts.knobs import Knobs
from services.reallocator.config import ReallocatorConfig
from services.reallocator.planning.plan import plan
from services.reallocator.planning.records import Candidate, InstanceView, ReallocationRules
from services.reallocator.planning.throughput import ThroughputCurve
from services.simulator.cluster_simulation import ClusterSimulation
from services.simulator.device_tables import L40S, LLAMA_8B, ModelSizes, decoding_table, with_host
from services.simulator.simulation_setup import (
    LogNormalLengths,
    SimulatedSource,
    SimulatedWorkload,
    SimulationSetup,
)
from services.simulator.step_decider import StepDecider

PLAIN = decoding_table("8B L40S", LLAMA_8B, L40S)
# One layer, and the head.
_HEAD = decoding_table("EAGLE head", ModelSizes(0.75e9, 1, 4096, 32, 8), L40S)
DRAFTING = with_host(PLAIN, 5 * _HEAD.seconds(16, 16, 0.0))
PUBLISHED = {1: 103.0, 6: 765.0, 19: 1415.0, 24: 1453.0}
"""Tokens a second of an instance with so many samples (section 3.3)."""
BEFORE, AFTER, MOVED = 1556.0, 2180.0, 5
GAINS = {"Spec": 1.18, "Selection": 1.95, "Reallocation": 2.32}
"""Throughput over that of plain decoding, as methods are added (section 7.4)."""
LENGTHS = LogNormalLengths(378, log(1373 / 378) / 1.6449, 2048)
NODES, OTHERS = 24, (16, 32, 48)
"""Tokens that static speculation is assumed to verify, and others that show what the assumption does."""
_CONTEXT, _SEEDS = 600, 3


def replay() -> list[ReplayedCell]:
    """Return the cells of both figures, and of each as it would be with other numbers of verified tokens."""
    others = [cell for nodes in OTHERS for cell in figure_5(nodes) + figure_13(nodes)]
    return figure_5() + figure_13() + others


def figure_5(nodes: int = NODES) -> list[ReplayedCell]:
    """Return the throughput by samples, and what the reallocator's plan makes of 24 and 1."""
    table = _named("RLHFSpec, Figure 5", nodes)
    acceptance = solved(PUBLISHED[1], lambda p: _curve(p, 1, nodes).throughput(1), 0.3, 0.99)
    curve = _curve(acceptance, 64, nodes)
    cells = [
        ReplayedCell(table, f"{n} samples", "tokens/s", there, curve.throughput(n), fitted=n == 1)
        for n, there in PUBLISHED.items()
    ]
    threshold = curve.saturation_point(ReallocatorConfig.model_fields["flatness"].default) or 64
    moved, after = replanned(curve, threshold)
    before = curve.throughput(24) + curve.throughput(1)
    row = "24 and 1 samples"
    return [
        *cells,
        ReplayedCell(table, row, "tokens/s before", BEFORE, before),
        ReplayedCell(table, row, "samples moved", MOVED, moved),
        ReplayedCell(table, row, "tokens/s after", AFTER, after),
        ReplayedCell(table, row, "gain", AFTER / BEFORE, after / before),
    ]


def replanned(curve: ThroughputCurve, threshold: int) -> tuple[int, float]:
    """Return how many of 24 samples the plan moves to an instance with 1, and tokens a second after that."""
    views = [
        InstanceView(
            name,
            count,
            64 - count,
            100_000,
            curve,
            threshold,
            tuple(Candidate(f"{name}/{n}", _CONTEXT, 0.0, float(_CONTEXT), 38) for n in range(count)),
        )
        for name, count in (("one", 24), ("two", 1))
    ]
    moved = sum(len(each.moves) for each in plan(views, ReallocationRules()))
    return moved, curve.throughput(24 - moved) + curve.throughput(1 + moved)


def published_curve(most: int = 64) -> ThroughputCurve:
    """Return step times between the published points; beyond the last they grow as between the last two."""
    counts = np.array(sorted(PUBLISHED), float)
    seconds = counts / np.array([PUBLISHED[int(each)] for each in counts])
    slope = (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2])
    wanted = np.arange(1, most + 1)
    found = np.interp(wanted, counts, seconds) + np.maximum(0.0, wanted - counts[-1]) * slope
    return ThroughputCurve(tuple(float(each) for each in found))


def figure_13(nodes: int = NODES) -> list[ReplayedCell]:
    """Return the throughput of a generation stage over that of plain decoding."""
    table = _named("RLHFSpec, Figure 13", nodes)
    plain = _stage(None, "planner", False, nodes)
    acceptance = solved(GAINS["Spec"], lambda p: _stage(p, "fixed", False, nodes) / plain, 0.3, 0.99, 10)
    found = {
        "Spec": _stage(acceptance, "fixed", False, nodes),
        "Selection": _stage(acceptance, "planner", False, nodes),
        "Reallocation": _stage(acceptance, "planner", True, nodes),
    }
    return [
        ReplayedCell(table, name, "gain", GAINS[name], rate / plain, fitted=name == "Spec")
        for name, rate in found.items()
    ]


def _named(table: str, nodes: int) -> str:
    return table if nodes == NODES else f"{table}, {nodes} tokens"


def _sources(acceptance: float) -> tuple[SimulatedSource, ...]:
    return (SimulatedSource("eagle3", acceptance),)


def _curve(acceptance: float, most: int, nodes: int) -> ThroughputCurve:
    """Return step times by samples with static speculation, in times of a token."""
    decider = StepDecider(DRAFTING, Knobs(mode="fixed", draft_cap=nodes), _sources(acceptance))
    tokens = decider.decide({"open": 1}, _CONTEXT).tokens["open"]
    return ThroughputCurve(
        tuple(DRAFTING.seconds(n, n * (1 + nodes), n * _CONTEXT) / tokens for n in range(1, most + 1))
    )


def _stage(acceptance: float | None, mode: str, moves: bool, nodes: int) -> float:
    """Return the samples a second of a generation stage, on average over seeds."""
    setup = SimulationSetup(
        PLAIN if acceptance is None else DRAFTING,
        8,
        SimulatedWorkload(LENGTHS, 512, 1, 256),
        knobs=Knobs(mode=mode, draft_cap=nodes),  # type: ignore[arg-type]
        sources=() if acceptance is None else _sources(acceptance),
        reallocation=ReallocatorConfig.model_construct() if moves else None,
        max_running=64,
        foreseen=False,
        # KV of a token over PCIe, at 20 GB/s.
        kv_seconds=LLAMA_8B.kv_bytes / 20e9,
    )
    steps = [next(ClusterSimulation(replace(setup, seed=seed)).run()) for seed in range(_SEEDS)]
    return fmean(each.samples / each.seconds for each in steps)
