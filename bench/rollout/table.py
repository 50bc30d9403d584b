"""Compute the rollout table from its cells. Pure.

Systems are compared within a round, in which they ran one after the other on the same machine in the same state.
With at least six rounds a ratio has its 95 % interval from order statistics, with fewer its range. The first step
is not counted, because nothing can be known before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from bench.intervals import MedianInterval, median_interval
from bench.policy.figures import verdict
from bench.rollout.cells import StepFigures, TableCell
from bench.rollout.modelled import H100_8B
from bench.rollout.registry import EVERYTHING, FOR_H100, LONG_TAIL, PLAIN
from bench.simulate.verification import DraftKind

UPDATE_SHARE = 0.25
"""The trainer's update, as a share of plain decoding's step."""
WARM_UP = 1
"""Steps at the beginning that are not counted."""
_INTERVAL_ROUNDS = 6
GOALS = {
    "speedup_vs_plain_long_tail": 3.0,
    "speedup_vs_best_vllm_long_tail": 1.7,
    "step_time_reduction": 0.45,
    "worst_regime_vs_plain_upper": 0.98,
}
"""Minimum values of figures; in addition no token may differ."""
Rounds = Mapping[int, TableCell]
Table = Mapping[str, Mapping[str, Rounds]]
"""The cells that have figures, by regime, system and round."""
ReplaysOff = Mapping[DraftKind, float]
"""Share by which published speeds lie outside the band of their replays, by kind of drafts (bench/simulate)."""


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """A ratio of paired rounds: its median and the bounds of its interval, or of its range."""

    low: float
    median: float
    high: float
    rounds: int

    @property
    def is_interval(self) -> bool:
        """True if the bounds enclose the true median with 95 % probability, for any distribution."""
        return self.rounds >= _INTERVAL_ROUNDS


def update_of(rollout: float) -> float:
    """Return the trainer's seconds for a step whose rollout takes `rollout` seconds."""
    return rollout * UPDATE_SHARE / (1 - UPDATE_SHARE)


class StepLine(NamedTuple):
    """Seconds of an engine step on this machine, and of each row (token) that it computes."""

    step: float
    row: float


def line_of(table: Table) -> StepLine | None:
    """Return the line through plain decoding's loads in all regimes, by least squares of relative errors.

    None if there are fewer than two loads, or none with more than one row.
    """
    cells = [cell for systems in table.values() for cell in systems.get(PLAIN, {}).values()]
    loads = [load for cell in cells for step in counted(cell) for load in step.loads]
    measured = np.array([(load.steps, load.rows) for load in loads if load.seconds], np.float64)
    seconds = np.array([load.seconds for load in loads if load.seconds])
    if len(measured) < 2 or np.linalg.matrix_rank(measured) < 2:
        return None
    (step, row), *_ = np.linalg.lstsq(measured / seconds[:, None], np.ones(len(seconds)), rcond=None)
    return StepLine(float(step), float(row))


def line_share(cells: Iterable[TableCell], line: StepLine) -> float | None:
    """Return the seconds that the line predicts for a system's engine steps, as a share of its rollout seconds.

    The slowest instance counts. None for cells without loads.
    """
    steps = [step for cell in cells for step in counted(cell) if step.loads]
    if not steps:
        return None
    allowed = sum(max(line.step * load.steps + line.row * load.rows for load in each.loads) for each in steps)
    return allowed / sum(each.rollout_seconds for each in steps)


def table_of(cells: Iterable[TableCell]) -> dict[str, dict[str, dict[int, TableCell]]]:
    """Return the cells that have figures, by regime, system and round."""
    found: dict[str, dict[str, dict[int, TableCell]]] = {}
    for cell in cells:
        if cell.steps and cell.absent is None:
            found.setdefault(cell.name.regime, {}).setdefault(cell.name.system, {})[cell.name.round] = cell
    return found


def counted(cell: TableCell) -> Sequence[StepFigures]:
    """Return the steps of a cell that count; all if there are no more than the warm-up."""
    return cell.steps[WARM_UP:] or cell.steps


def rollout_seconds(cell: TableCell) -> float:
    """Return the mean rollout time of a step."""
    return fmean(step.rollout_seconds for step in counted(cell))


def modelled_seconds(device: str) -> Callable[[TableCell], float]:
    """Return a function that computes the mean rollout time of a step by a device's table."""
    return lambda cell: fmean(step.modelled[device].rollout for step in counted(cell))


def step_seconds(cell: TableCell) -> float:
    """Return the mean time of a step: rollout and the trainer's update."""
    return rollout_seconds(cell) + cell.update_seconds


def paired(base: Rounds, other: Rounds, figure: Callable[[TableCell], float]) -> PairedRatio | None:
    """Return base / other over the rounds that both have; None if they have none in common."""
    ratios = [figure(base[place]) / figure(other[place]) for place in sorted(base.keys() & other.keys())]
    if not ratios:
        return None
    enough = len(ratios) >= _INTERVAL_ROUNDS
    ends = median_interval(ratios) if enough else MedianInterval(min(ratios), median(ratios), max(ratios))
    return PairedRatio(ends.low, ends.median, ends.high, len(ratios))


def paired_low(base: Rounds, other: Rounds, device: str) -> PairedRatio | None:
    """Return the modelled base / other at the pessimistic end; None if a cell is from before there was one."""
    both = [*base.values(), *other.values()]
    if any(step.modelled[device].pessimistic is None for cell in both for step in counted(cell)):
        return None
    return paired(
        base, other, lambda cell: fmean(step.modelled[device].pessimistic or 0.0 for step in counted(cell))
    )


def row(
    rounds: Rounds, plain: Rounds | None, line: StepLine | None = None, replays: ReplaysOff | None = None
) -> dict[str, Any]:
    """Return the columns of a system in a regime: means over its rounds, ratios of paired ones.

    `modelled` has the columns of each modelled device.
    """
    cells = [rounds[place] for place in sorted(rounds)]
    steps = [step for cell in cells for step in counted(cell)]
    drafted, accepted, verified = (
        sum(getattr(step, name) for step in steps) for name in ("drafted", "accepted", "verified")
    )
    tokens, covered = sum(step.tokens for step in steps), [step.covered for step in steps]
    decode_steps = sum(step.decode_steps_mean * step.samples for step in steps)
    return {
        "rounds": len(cells),
        "speedup_vs_plain": None if plain is None else paired(plain, rounds, rollout_seconds),
        "step_speedup_vs_plain": None if plain is None else paired(plain, rounds, step_seconds),
        "rollout_seconds": fmean(map(rollout_seconds, cells)),
        "step_seconds": fmean(map(step_seconds, cells)),
        "push_seconds": fmean(step.push_seconds for step in steps),
        "tokens_of_step": fmean(step.tokens for step in steps),
        "decode_steps_mean": fmean(step.decode_steps_mean for step in steps),
        "decode_steps_max": fmean(step.decode_steps_max for step in steps),
        "acceptance_length": 1 + accepted / verified if verified else None,
        "acceptance_rate": accepted / drafted if drafted else None,
        "draft_length": drafted / verified if verified else None,
        "coverage": None if None in covered else sum(each or 0 for each in covered) / tokens,
        "bubble_seconds_mean": fmean(step.bubble_seconds_mean for step in steps),
        "bubble_seconds_max": fmean(step.bubble_seconds_max for step in steps),
        "moved_megabytes": fmean(step.moved_bytes for step in steps) / 1e6,
        "reward": fmean(step.reward for step in steps),
        "samples_differing": sum(step.differing for cell in cells for step in cell.steps),
        "tokens_compared": sum(step.compared for cell in cells for step in cell.steps),
        "last_sample_steps": fmean(step.last_steps for step in steps),
        "last_sample_seconds": fmean(step.last_seconds for step in steps),
        "tokens_per_decode_step": tokens / decode_steps if decode_steps else None,
        "line_share": None if line is None else line_share(cells, line),
        "modelled": {device: modelled_row(device, rounds, plain, replays) for device in steps[0].modelled},
    }


def modelled_row(
    device: str, rounds: Rounds, plain: Rounds | None, replays: ReplaysOff | None = None
) -> dict[str, Any]:
    """Return the columns of a system in a regime on a modelled device.

    `speedup_vs_plain` is the optimistic end of a band, `speedup_vs_plain_low` the pessimistic one. `replays_off` is
    the share by which published speeds with the same kind of drafts lie outside the band. Both are None if unknown.
    `ahead_share` is the time of generating ahead, as a share of the time available for it: the idle time of an
    instance in a step, and the trainer's update. Above 1 the device would have generated less ahead.
    """
    seconds = modelled_seconds(device)
    kind = draft_kind(device, rounds)
    steps = [step.modelled[device] for cell in rounds.values() for step in counted(cell)]
    free = fmean(step.idle for step in steps)
    if plain:
        free += update_of(fmean(map(seconds, plain.values())))
    return {
        "rollout_seconds": fmean(map(seconds, rounds.values())),
        "speedup_vs_plain": None if plain is None else paired(plain, rounds, seconds),
        "speedup_vs_plain_low": None if plain is None else paired_low(plain, rounds, device),
        "replays_off": None if kind is None or replays is None else replays[kind],
        "ahead_share": fmean(step.ahead for step in steps) / free if free else None,
    }


def draft_kind(device: str, rounds: Rounds) -> DraftKind | None:
    """Return the kind of drafts in a system's steps; None without drafts."""
    steps = [step for cell in rounds.values() for step in counted(cell)]
    if any(step.modelled[device].passes for step in steps):
        return DraftKind.MODELS
    return DraftKind.LOOKUPS if any(step.drafted for step in steps) else None


def rows(table: Table, replays: ReplaysOff | None = None) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the columns of all systems, by regime and system."""
    line = line_of(table)
    return {
        regime: {name: row(rounds, systems.get(PLAIN), line, replays) for name, rounds in systems.items()}
        for regime, systems in table.items()
    }


def headline(table: Table, vllm: Collection[str], recorded: Iterable[str]) -> dict[str, float | int | None]:
    """Return the figures that have goals; None if their cells are missing.

    Args:
        table: the cells.
        vllm: names of vLLM's own methods; the one with the least median time is the best.
        recorded: names of systems that must give the recorded tokens.
    """
    systems = table.get(LONG_TAIL, {})
    plain, ours = systems.get(PLAIN, {}), systems.get(EVERYTHING, {})
    best = best_of({name: systems[name] for name in vllm if name in systems}, rollout_seconds)
    faster = paired(plain, ours, rollout_seconds)
    best_faster = paired(best, ours, rollout_seconds)
    whole = paired(plain, ours, step_seconds)
    # Stock engines are given the recorded tokens, and cannot differ.
    exact = set(recorded) - {PLAIN, *vllm}
    differing = [
        step.differing
        for named in table.values()
        for name, rounds in named.items()
        if name in exact
        for cell in rounds.values()
        for step in cell.steps
    ]
    regimes = [
        paired(named[PLAIN], named[EVERYTHING], rollout_seconds)
        for named in table.values()
        if PLAIN in named and EVERYTHING in named
    ]
    return {
        "speedup_vs_plain_long_tail": _ends(faster).median,
        "speedup_vs_plain_long_tail_upper": _ends(faster).high,
        "speedup_vs_best_vllm_long_tail": _ends(best_faster).median,
        "speedup_vs_best_vllm_long_tail_upper": _ends(best_faster).high,
        "step_time_reduction": _saved(_ends(whole).median),
        "step_time_reduction_upper": _saved(_ends(whole).high),
        "tokens_differing": sum(differing) if differing else None,
        **modelled_figures(table, vllm),
        "worst_regime_vs_plain_upper": min((each.high for each in regimes if each is not None), default=None),
        "paired_rounds": min((each.rounds for each in regimes if each is not None), default=0),
    }


def modelled_figures(table: Table, vllm: Collection[str]) -> dict[str, float | None]:
    """Return rollout speedups by the step times of an 8B model on an H100, by regime.

    `modelled_` figures are for Paceline as it planned here, `modelled_planned_` figures as it plans for that
    device. Figures with `_low` are the pessimistic end of the band.
    """
    seconds, found = modelled_seconds(H100_8B), dict[str, float | None]()
    for regime, systems in table.items():
        place = regime.replace(" ", "_").replace("-", "_")
        best = best_of({name: systems[name] for name in vllm if name in systems}, seconds)
        for kind, system in (("modelled", EVERYTHING), ("modelled_planned", FOR_H100)):
            ours = systems.get(system, {})
            plain = _ends(paired(systems.get(PLAIN, {}), ours, seconds))
            found[f"{kind}_speedup_vs_plain_{place}"] = plain.median
            found[f"{kind}_speedup_vs_best_vllm_{place}"] = _ends(paired(best, ours, seconds)).median
            low = _ends(paired_low(systems.get(PLAIN, {}), ours, H100_8B))
            found[f"{kind}_low_speedup_vs_plain_{place}"] = low.median
    return found


class _Ends(NamedTuple):
    """Median and upper bound of a ratio, for the headline."""

    median: float | None
    high: float | None


def _ends(ratio: PairedRatio | None) -> _Ends:
    return _Ends(None, None) if ratio is None else _Ends(ratio.median, ratio.high)


def _saved(speedup: float | None) -> float | None:
    return None if speedup is None else 1 - 1 / speedup


def best_of(systems: Mapping[str, Rounds], figure: Callable[[TableCell], float]) -> Rounds:
    """Return the rounds of the system with the least median figure; empty without systems."""
    if not systems:
        return {}
    return min(systems.values(), key=lambda rounds: median(map(figure, rounds.values())))


def verdicts(figures: Mapping[str, float | int | None]) -> dict[str, str]:
    """Return the state of each goal: met, missed, within error, or not measured."""
    found = {}
    for name, goal in GOALS.items():
        value = figures[name]
        upper = figures.get(f"{name}_upper", value)
        found[name] = "not measured" if value is None or upper is None else verdict(value, upper, goal)
    differing = figures["tokens_differing"]
    found["tokens_differing"] = "not measured" if differing is None else "missed" if differing else "met"
    return found
