"""EfficientRollout, Table 2: 8 A100, 128 prompts of 8 samples, at most 8k tokens, and a W4 copy that drafts.

Inputs are mean response lengths (Table 5), draft lengths and acceptance rates (Table 2), and the time of an
EAGLE-3 pass (Table 6). One number is fitted, the host's time between two steps, by the rollout time of plain
decoding with Qwen2.5-7B; the other models have the same. The paper leaves open how long responses are beyond
their mean. Assumed are 3 in 1,000 samples that go on to the limit, because its completion curves (Appendix A)
end where one sample of 8k tokens would, and log-normal lengths for the rest, half of whose variance is between
prompts. (The device's table has 0.9 ms of host, so that the fitted number may be below 0.) A W4 pass takes the
share of a step's memory traffic that Table 4 gives, 0.36, without what its kernels cost; nothing is added for
verification but what the device's table has. The history-based row is left out: it takes prefixes over with a
lossy rule before a sample starts, which no planner decides. The toggle is the instance's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp
from statistics import fmean

import numpy as np

from bench.simulate.replay import ReplayedCell, solved
from services.contracts.knobs import Knobs
from services.simulator.cluster_simulation import ClusterSimulation
from services.simulator.device_tables import (
    A100,
    LLAMA_8B,
    QWEN25_7B,
    QWEN25_14B,
    DeviceTable,
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

_LIMIT, _SPREAD, _ENDLESS = 8192, 0.45, 0.003
_PROMPTS, _SAMPLES, _STEPS, _W4 = 128, 8, 6, 0.36


@dataclass(frozen=True, slots=True)
class EfficientRolloutRow:
    """Row of a method: mode, draft length, acceptance, and seconds of preparation, rollout and step."""

    name: str
    mode: str
    length: int
    acceptance: float
    prepared: float
    rollout: float
    step: float


@dataclass(frozen=True, slots=True)
class EfficientRolloutModel:
    """Model of Table 2: its mean response in tokens, plain times, EAGLE-3 pass in milliseconds, and methods."""

    name: str
    sizes: ModelSizes
    mean: float
    rollout: float
    step: float
    eagle: float
    rows: tuple[EfficientRolloutRow, ...]


MODELS = (
    EfficientRolloutModel("Qwen2.5-7B", QWEN25_7B, 661.4, 82.4, 132.6, 0.82, (
        EfficientRolloutRow("Learned auxiliary", "fixed", 3, 0.573, 2.2, 81.9, 132.1),
        EfficientRolloutRow("Quantized self-SD", "fixed", 7, 0.982, 1.3, 75.6, 127.6),
        EfficientRolloutRow("EfficientRollout", "toggle", 8, 0.982, 1.3, 66.3, 115.7),
    )),
    EfficientRolloutModel("Qwen2.5-14B", QWEN25_14B, 622.9, 126.6, 221.1, 0.91, (
        EfficientRolloutRow("Learned auxiliary", "fixed", 3, 0.603, 2.1, 115.4, 213.8),
        EfficientRolloutRow("Quantized self-SD", "fixed", 5, 0.973, 2.6, 135.0, 225.4),
        EfficientRolloutRow("EfficientRollout", "toggle", 7, 0.976, 2.6, 105.3, 197.2),
    )),
    EfficientRolloutModel("Llama3.1-8B", LLAMA_8B, 646.2, 126.4, 186.9, 0.85, (
        EfficientRolloutRow("Learned auxiliary", "fixed", 3, 0.543, 2.6, 172.8, 234.8),
        EfficientRolloutRow("Quantized self-SD", "fixed", 5, 0.963, 1.4, 118.9, 178.2),
        EfficientRolloutRow("EfficientRollout", "toggle", 5, 0.958, 1.4, 112.9, 172.2),
    )),
)  # fmt: skip


def replay() -> list[ReplayedCell]:
    """Return the cells of the table."""
    first, cells = MODELS[0], list[ReplayedCell]()
    host = solved(first.rollout, lambda seconds: _rollout(first, seconds), -0.0009, 0.005, 10)
    for model in MODELS:
        plain = _rollout(model, host)
        others = model.step - model.rollout
        cells += _cells(model, "veRL (AR)", (model.rollout, model.step), plain, others, model is first)
        for row in model.rows:
            found = _rollout(model, host, row)
            cells += _cells(model, row.name, (row.rollout, row.step), found, others + row.prepared, False)
    return cells


def _cells(
    model: EfficientRolloutModel,
    method: str,
    published: tuple[float, float],
    rollout: float,
    others: float,
    fitted: bool,
) -> list[ReplayedCell]:
    row, table = f"{model.name}, {method}", "EfficientRollout, Table 2"
    cells = [ReplayedCell(table, row, "rollout s", published[0], rollout, fitted)]
    if not fitted:
        # The rest of a plain step is as published, so a plain rollout that is fitted fits it as well.
        cells.append(ReplayedCell(table, row, "step s", published[1], rollout + others))
    return cells


def _rollout(model: EfficientRolloutModel, host: float, row: EfficientRolloutRow | None = None) -> float:
    """Return the seconds of a rollout, on average over the steps of a run."""
    setup = SimulationSetup(
        with_host(decoding_table(model.name, model.sizes, A100), host),
        8,
        SimulatedWorkload(_lengths(model.mean), _PROMPTS, _SAMPLES, 256),
        _STEPS,
        max_running=128,
        foreseen=False,
    )
    if row is not None:
        passes = _eagle(model) if row.name == "Learned auxiliary" else _quantized(model)
        knobs = Knobs(mode=row.mode, draft_cap=row.length, latch=row.mode == "toggle")  # type: ignore[arg-type]
        setup = replace(setup, knobs=knobs, sources=(SimulatedSource("model", row.acceptance, passes),))
    return fmean(step.seconds for step in ClusterSimulation(setup).run())


def _quantized(model: EfficientRolloutModel) -> DeviceTable:
    return decoding_table("W4", model.sizes, A100, weight_bytes=2 * _W4)


def _eagle(model: EfficientRolloutModel) -> DeviceTable:
    return DeviceTable("EAGLE-3", 1, np.array([1.0, 1024.0]), np.full(2, model.eagle))


def _lengths(mean: float) -> LogNormalLengths:
    bulk = (mean - _ENDLESS * _LIMIT) / (1 - _ENDLESS)
    return LogNormalLengths(bulk / exp(_SPREAD**2 / 2), _SPREAD, _LIMIT, endless=_ENDLESS)
