"""Rollouts with the copy of Qwen3-8B on H100s, by its table of step times and the acceptance measured here.

The workload is EfficientRollout's (bench/simulate/efficientrollout.py): 8 devices, 128 prompts of 8 samples, at
most 8,192 tokens, 661 on average. A pass of the copy takes the time of a step whose weights have so many bytes,
times what kernels seem to move for each byte that they need. Decisions are those of an instance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from services.contracts.knobs import Acceptance, Knobs, LadderKnobs
from services.generation.speculation.plan import DraftableBatch, choose_lengths
from services.policy.steps import climb, start
from services.simulator.cluster_simulation import ClusterSimulation
from services.simulator.device_tables import H100, H200, QWEN3_8B, decoding_table, swept
from services.simulator.modelled_instance import SimulatedStep
from services.simulator.simulation_setup import (
    LogNormalLengths,
    SimulatedSource,
    SimulatedWorkload,
    SimulationSetup,
)
from services.step_time.estimator import StepTimeEstimator

# Bytes of a weight, with the scale that 128 of them share, and that a kernel seems to move for each: dequantising
# costs, and the kernels differ.
_BYTES, _OVERHEAD = {4: 0.5 + 2 / 128, 8: 1 + 2 / 128}, 1.25
_GPUS = {"H100 SXM": H100, "H200": H200}
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_LENGTHS = LogNormalLengths(570.0, 0.45, 8192, endless=0.003)
_CAPS = (4, 8)
LADDER = LadderKnobs(lengths=(2, 4, 6, 8, 12, 16))
"""Rungs of the simulated ladder; it begins at 4, as the mode's own does."""
_FIXED = (4, 8, 16)


def passes(bits: int, overhead: float = _OVERHEAD) -> Any:
    """Return the table of the copy's passes on an H100."""
    return decoding_table(f"W{bits}", QWEN3_8B, H100, weight_bytes=_BYTES[bits] * overhead)


def rollout(
    mode: str, cap: int, source: SimulatedSource | None, samples: int = 8, seed: int = 0
) -> SimulatedStep:
    """Return a simulated rollout; `samples` of a prompt."""
    setup = SimulationSetup(
        decoding_table("8B H100", QWEN3_8B, H100),
        8,
        SimulatedWorkload(_LENGTHS, 128, samples, 256),
        1,
        Knobs(mode=mode, draft_cap=cap, latch=mode == "toggle"),  # type: ignore[arg-type]
        max_running=128,
        foreseen=False,
        seed=seed,
    )
    if source is not None:
        setup = replace(setup, sources=(source,))
    return next(iter(ClusterSimulation(setup).run()))


def toggling(by_place: dict[int, Sequence[float]]) -> list[dict[str, Any]]:
    """Return rollouts with the copy always on, toggled and planned (EfficientRollout, Figure 4), by bits."""
    plain = rollout("planner", 1, None).seconds
    rows = [{"copy": "none", "mode": "", "cap": 0, "seconds": plain, "of_plain": 1.0, "draft_length": 0.0}]
    for bits, rates in by_place.items():
        source = SimulatedSource("quantized", tuple(rates), passes(bits))
        for mode, cap in [("fixed", c) for c in _CAPS] + [("toggle", c) for c in _CAPS] + [("planner", 16)]:
            found = rollout(mode, cap, source)
            rows.append(
                {
                    "copy": f"W{bits}",
                    "mode": mode,
                    "cap": cap,
                    "seconds": found.seconds,
                    "of_plain": found.seconds / plain,
                    "draft_length": found.draft_length,
                }
            )
    return rows


def laddering(by_step: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """Return a training run with the cap on the ladder, with fixed caps, and planned (Figure 5a).

    `by_step` are the acceptances by position of each training step.
    """
    table = passes(4)
    sources = [SimulatedSource("quantized", tuple(rates), table) for rates in by_step]
    plain = fmean(rollout("planner", 1, None, seed=step).seconds for step in range(len(sources)))
    rows = []
    for name, mode, cap in (
        *((f"fixed {cap}", "toggle", cap) for cap in _FIXED),
        ("ladder", "toggle", 0),
        ("planner", "planner", 16),
    ):
        rung, seconds, caps = start(LADDER, 4), [], []
        for step, source in enumerate(sources):
            found = rollout(mode, cap or rung.cap, source, seed=step)
            seconds.append(found.seconds)
            caps.append(cap or rung.cap)
            rung = climb(LADDER, rung, _acceptance(found)).rung
        rows.append(
            {"way": name, "seconds": fmean(seconds), "of_plain": fmean(seconds) / plain, "caps": caps}
        )
    return rows


def _acceptance(step: SimulatedStep) -> Acceptance:
    """Return what the policy service is told of a step's verifications."""
    count = 10_000 if step.draft_length else 0
    return Acceptance(count, round(count * step.draft_length), round(count * (step.acceptance_length - 1)))


def refresh_seconds() -> float:
    """Return the time in which an H100 reads the weights in 16 bits and writes them in 4, at its bandwidth."""
    return QWEN3_8B.weights * (2 + _BYTES[4]) / H100.bandwidth


def predicted(acceptance: float, context: int = 4096, most: int = 16) -> list[dict[str, Any]]:
    """Return predictions of where the quantized copy of Qwen3-8B pays on a GPU: a row for each device and batch.

    `gain` is tokens a second over plain decoding with the best depth; depth 0: it does not pay. Every drafted token
    is accepted with probability `acceptance` if those before it were; samples have `context` tokens each.
    """
    rows = []
    for name, chip in _GPUS.items():
        target = decoding_table(name, QWEN3_8B, chip)
        drafter = decoding_table(name, QWEN3_8B, chip, weight_bytes=_BYTES[4] * _OVERHEAD)
        for n in _BATCHES:
            nothing = np.zeros(n)
            batch = DraftableBatch(np.full(n, most), nothing, nothing, n * context)
            step_time, pass_time = StepTimeEstimator(swept(target, n)), StepTimeEstimator(swept(drafter, n))
            plain, drafting = (table.seconds(n, n, n * context) for table in (target, drafter))
            step_time.observe(n, n, n * context, plain)
            pass_time.observe(n, n, n * context, drafting)
            best = choose_lengths(batch, [acceptance] * most, step_time, pass_time, margin=0.02)
            rows.append(
                {
                    "gpu": name,
                    "batch": n,
                    "acceptance": acceptance,
                    "depth": int(best.tokens.max()),
                    "gain": best.gain,
                    "draft_over_target": drafting / plain,
                }
            )
    return rows
