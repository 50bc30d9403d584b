"""Measure the step-time estimator and the modes of speculation on a real engine.

The engine is measured as an instance does when it starts. It then decodes batches whose drafts are the true
responses with a share of wrong tokens. The modes are: plain decoding, the best fixed draft lengths, 8 tokens when
the toggle says so, the adaptive length, the solver's table, and the planner. The models are tinymath and a small
random mixture of experts.

One engine serves all cells of a model. A cell is a batch size and a share of wrong tokens. First the fixed lengths
that cannot win are sifted out, and the other modes run 32 steps, so that they start as on an instance that is not
new. Then all modes take turns in short rounds, must give the same tokens, and are compared within each round. Time
is the process's own processor time, so that other processes on the machine have little effect on it. Writes
runs/bench/policy.json.

    python -m bench.policy [--rounds 15] [--samples 8,32,128] [--wrong 0.02,0.15,0.4,0.95] [--model DIR]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

from bench.intervals import MedianInterval
from bench.policy.cells import MOST, GivenCells, MeasuredModel, measure_model
from bench.policy.figures import ADAPTIVE, PLAIN, PLANNER, SOLVER, TOGGLE, MeasuredCell, figures_of, verdict
from bench.random_model import make_random_experts
from bench.report import BenchProgress, Figures, format_value, numbers, option_parser, show_rows, write
from bench.worker import apart

_FOLDER = Path("runs/bench/policy")
_MODEL = Path("examples/tinymath/model")
_SAMPLES = (8, 32, 128)
_WRONG = (0.02, 0.15, 0.4, 0.95)
# Cells of the mixture of experts; its other cells would add little information.
_EXPERTS_SAMPLES, _EXPERTS_WRONG = (32,), (0.02, 0.4, 0.95)
# The median of fewer rounds has no interval.
_LEAST_ROUNDS = 6
_AT_LEAST = {"planner_vs_best_fixed_min": 0.97, "worst_ratio_vs_plain": 0.98, "planner_worst_vs_plain": 0.98}
_AT_MOST = {"step_time_error_median": 0.08, "step_time_error_p90": 0.25, "planner_us_256": 150}
_COLUMNS = (
    *("model", "samples", "wrong tokens", "plain, tokens/s", "best fixed length"),
    *(TOGGLE, ADAPTIVE, SOLVER, PLANNER, "planner, of the best"),
)
_NOTE = (
    "Ratios are medians over paired rounds with 95 % intervals from order statistics; a goal is missed where the"
    " whole interval of a cell lies below it: where ..._upper, the least upper end of all cells, does."
    " The best fixed length is picked in the odd rounds for the even ones and the other way round."
    " worst_ratio_vs_plain is the toggle's, over all cells and draft lengths. Times have drafters and planning in"
    " them. ..._cold is of the first round of each cell, in which modes and drafters know nothing."
    " planner_us_256 is a whole decision for 256 samples, 2 drafters and 16 tokens: from proposals to token lists."
    " step_time_error... is of the planner's estimator before it learns from the step."
)


def main() -> None:
    """Measure both models, then show and write the figures."""
    arguments = _arguments()
    given = _given(arguments)
    progress = BenchProgress(sum(len(each.samples) * len(each.wrong) for each in given), "policy")
    models = list[MeasuredModel]()
    for each in given:
        # vLLM allows one engine in a process.
        models.append(apart(measure_model, each, progress))
        progress = models[-1].progress
    cells = [cell for model in models for cell in model.cells]
    shown = show_rows("policy: times as fast as plain decoding", _COLUMNS, [*map(_row, cells)])
    figures = {**figures_of(cells), "planner_us_256": models[0].decision_us}
    rows = [(name, format_value(value), *_goal(name, figures)) for name, value in figures.items()]
    show_rows("policy", ("figure", "value", "goal", ""), rows)
    print(_NOTE)
    write(
        "policy",
        {
            **figures,
            "goals": {name: goal for name, _, goal, _ in rows if goal},
            "tables": {"cells": shown},
            "cells": [cell.row() for cell in cells],
            "sweep": {
                each.name: [step.model_dump() for step in model.sweep]
                for each, model in zip(given, models, strict=True)
            },
            "note": _NOTE,
            "rounds": arguments.rounds,
        },
    )


def _given(arguments: argparse.Namespace) -> list[GivenCells]:
    samples, wrong, rounds = arguments.samples, arguments.wrong, arguments.rounds
    if arguments.model is not None:
        return [GivenCells(arguments.model.name, arguments.model, samples, wrong, rounds)]
    experts = make_random_experts(
        _FOLDER / "experts", hidden=256, layers=2, experts=32, vocab_size=64, length=1024
    )
    few = [each for each in samples if each in _EXPERTS_SAMPLES] or samples[:1]
    some = [each for each in wrong if each in _EXPERTS_WRONG] or wrong[:1]
    return [
        GivenCells("tinymath", _MODEL, samples, wrong, rounds),
        GivenCells("experts", experts, few, some, rounds),
    ]


def _row(cell: MeasuredCell) -> tuple[str, ...]:
    """Return the cell's row of the table, in the order of `_COLUMNS`."""
    best, ratios = cell.best_fixed, cell.intervals
    return (
        cell.model,
        str(cell.samples),
        f"{cell.wrong:.0%}",
        format_value(cell.tokens / median(cell.seconds[PLAIN])),
        f"{best.split()[1]}: {_shown(ratios['best_fixed_vs_plain'])}",
        *(_shown(ratios[f"{mode}_vs_plain"]) for mode in (TOGGLE, ADAPTIVE, SOLVER, PLANNER)),
        _shown(ratios["planner_vs_best_fixed"]),
    )


def _shown(ratio: MedianInterval) -> str:
    return f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def _goal(name: str, figures: Figures) -> tuple[str, str]:
    """Return the goal of a figure and whether it is met."""
    value = figures[name]
    if name in _AT_LEAST:
        goal = _AT_LEAST[name]
        return f">= {goal}", verdict(value, figures[f"{name}_upper"], goal)
    if name in _AT_MOST:
        return f"<= {_AT_MOST[name]}", "met" if value <= _AT_MOST[name] else "missed"
    return "", ""


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--model", type=Path, help="model folder to measure instead of the two")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--samples", type=numbers(int), default=list(_SAMPLES), help="batch sizes")
    parser.add_argument("--wrong", type=numbers(float), default=list(_WRONG), help="shares of wrong tokens")
    arguments = parser.parse_args()
    if arguments.rounds < _LEAST_ROUNDS or max(arguments.samples) > MOST or min(arguments.samples) < 1:
        parser.error(f"at least {_LEAST_ROUNDS} rounds; batches of 1 to {MOST}")
    return arguments


if __name__ == "__main__":
    main()
