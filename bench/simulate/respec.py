"""ReSpec, Figures 7 and 14: EAGLE-3 with Qwen2.5 on H100, at batch sizes and in a whole run.

Figure 7 gives in words one configuration at two batch sizes: the best at 2, which slows 32 down. Its (s, t, n)
are not named; assumed are 5 passes and 32 draft tokens, in a tree that is simulated as RLHFSpec's is here: its
nodes in the order of their weights, which fall by one factor. The number of tokens was chosen with the slowdown
in view. What other numbers of tokens give is simulated beside it. The weights are fitted by the speedup at 2.

Figure 14 is the training of Qwen2.5-14B as methods are added. Generation takes 0.85 of a plain step (Table 1:
0.83 to 0.86). Fitted is the acceptance, by the gain of the learned drafter with a static configuration
(assumed: chains of 4, a pass each); the adaptive server is predicted. Assumed are 8 instances of 16 samples
(Figure 6 shows about so many at once), of 4,000 tokens on average (112k tokens of 28 samples in an update), at
most 8,192. What the overlap of the drafter's updates brings is not simulated: their time is not published.
"""

from __future__ import annotations

from dataclasses import replace
from math import exp
from statistics import fmean

from bench.simulate.replay import ReplayedCell, solved
from services.contracts.knobs import Knobs
from services.simulator.cluster_simulation import ClusterSimulation
from services.simulator.device_tables import (
    H100,
    QWEN25_7B,
    QWEN25_14B,
    ModelSizes,
    decoding_table,
    with_host,
)
from services.simulator.simulation_setup import (
    LogNormalLengths,
    SimulatedSource,
    SimulatedWorkload,
    SimulationSetup,
)
from services.simulator.step_decider import StepDecider

AT_2, AT_32 = 1.46, 0.76
KD, ADAPTIVE = 1.48, 1.66
NODES, OTHERS = 32, (16, 48)
"""Draft tokens of Figure 7's configuration as assumed, and others that show what the assumption does."""
_PASSES, _CHAIN, _GENERATION, _STEPS = 5, 4, 0.85, 4
# MT-Bench: some hundred tokens of prompt and answer.
_CONTEXT = 500
# One layer, and the head, of 7B and 14B.
_HEAD_7B = decoding_table("EAGLE-3 7B", ModelSizes(0.78e9, 1, 3584, 28, 4), H100)
_HEAD_14B = decoding_table("EAGLE-3 14B", ModelSizes(1.05e9, 1, 5120, 40, 8), H100)


def replay() -> list[ReplayedCell]:
    """Return the cells of both figures, and of Figure 7 as it would be with other numbers of draft tokens."""
    return figure_7() + figure_14() + [cell for nodes in OTHERS for cell in figure_7(nodes)]


def figure_7(nodes: int = NODES) -> list[ReplayedCell]:
    """Return the speedup of one configuration at two batch sizes."""
    table = "ReSpec, Figure 7" if nodes == NODES else f"ReSpec, Figure 7, {nodes} tokens"
    acceptance = solved(AT_2, lambda p: _speedup(p, 2, nodes), 0.1, 0.99)
    return [
        ReplayedCell(table, f"batch {n}", "speedup", there, _speedup(acceptance, n, nodes), fitted=n == 2)
        for n, there in ((2, AT_2), (32, AT_32))
    ]


def _speedup(acceptance: float, samples: int, nodes: int) -> float:
    plain = decoding_table("7B", QWEN25_7B, H100)
    drafting = with_host(plain, _PASSES * _HEAD_7B.seconds(samples, samples, samples * _CONTEXT))
    source = (SimulatedSource("eagle3", acceptance),)
    decided = StepDecider(drafting, Knobs(mode="fixed", draft_cap=nodes), source).decide(
        {"open": samples}, _CONTEXT
    )
    context = samples * _CONTEXT
    rows = samples * (1 + nodes)
    return (
        decided.tokens["open"]
        * plain.seconds(samples, samples, context)
        / drafting.seconds(samples, rows, context)
    )


def figure_14() -> list[ReplayedCell]:
    """Return the speed of whole steps over plain ones."""
    plain = _rollout(None, "planner")

    def gain(acceptance: float, mode: str) -> float:
        return 1 / (1 - _GENERATION + _GENERATION * _rollout(acceptance, mode) / plain)

    acceptance = solved(KD, lambda p: gain(p, "fixed"), 0.3, 0.95, 9)
    table = "ReSpec, Figure 14"
    return [
        ReplayedCell(table, "reward-weighted KD", "speedup", KD, gain(acceptance, "fixed"), fitted=True),
        ReplayedCell(table, "with the adaptive server", "speedup", ADAPTIVE, gain(acceptance, "solver")),
    ]


def _rollout(acceptance: float | None, mode: str) -> float:
    """Return the seconds of a generation stage, on average over the steps of a run."""
    spread = 0.6
    setup = SimulationSetup(
        decoding_table("14B", QWEN25_14B, H100),
        8,
        SimulatedWorkload(LogNormalLengths(4000 / exp(spread**2 / 2), spread, 8192), 16, 8, 256),
        _STEPS,
        Knobs(mode=mode, draft_cap=_CHAIN if mode == "fixed" else 8),  # type: ignore[arg-type]
        max_running=16,
        foreseen=False,
    )
    if acceptance is not None:
        setup = replace(setup, sources=(SimulatedSource("eagle3", acceptance, _HEAD_14B),))
    return fmean(step.seconds for step in ClusterSimulation(setup).run())
