"""Counts what drafting loses after a wrong draft token: decode steps, by length of the divergence and by source.

GRPO runs of two models at three learning rates are recorded once (bench/mismatch/records.py) and replayed without
an engine: the drafters and the planner of an instance draft for all samples of a step, in drafts of a fixed length,
and what they draft is compared with the recorded responses. So all figures are counts. Writes
runs/bench/mismatch.json.

    python -m bench.mismatch [--subjects tinymath tinymath-16m] [--rates 5e-5 1.5e-4 5e-4] [--arms NAME ...]
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from bench.mismatch.arms import ARMS, Arm, replay
from bench.mismatch.divergences import Divergence, divergences
from bench.mismatch.records import LEARNING_RATES, CountedRun, load_or_count
from bench.report import console, show_table, write
from bench.rollout.registry import SUBJECTS

_LENGTHS = ((1, "1"), (3, "2-3"), (7, "4-7"), (15, "8-15"), (31, "16-31"))
_LONGER, _NEVER = "32 and more", "never"
_COLUMNS = (
    ("steps a sample", "steps_per_sample"),
    ("tokens a step", "tokens_per_step"),
    ("accepted", "acceptance_rate"),
    ("divergences a sample", "divergences_per_sample"),
    ("first of them, of steps", "first_share"),
    ("inside, of steps", "inside_share"),
    ("lost, of steps", "lost_share"),
)
_IDEAS = {
    "saved_by_index_beside_reference": ("reference only", "reference"),
    "saved_by_indexed_references": ("reference, not indexed", "reference"),
    "saved_by_history_without_reference": ("siblings", "history"),
    "saved_by_history_beside_reference": ("reference, no history", "reference"),
    "saved_by_siblings_without_reference": ("history, no siblings", "history"),
    "saved_by_siblings_with_reference": ("reference, no siblings", "reference"),
    "saved_by_second_reference": ("reference", "two references"),
    "saved_by_choice_in_hindsight": ("reference", "reference, in hindsight"),
}
"""Share of steps saved: the way to draft without an idea, and the one with it."""


def main() -> None:
    """Record what is missing, replay, show and write."""
    warnings.simplefilter("ignore", SyntaxWarning)  # of packages that reasoning-gym imports
    given = _arguments()
    arms = [arm for arm in ARMS if arm.name in given.arms]
    found: dict[str, Any] = {}
    for subject in given.subjects:
        for lr in given.rates:
            counted = load_or_count(
                subject, lr, lambda line: console().print(f"mismatch: {line}", highlight=False)
            )
            name = f"{subject}, learning rate {lr:g}"
            found[name] = {"moved_kl": counted.moved_kl, "arms": {}}
            for arm in arms:
                found[name]["arms"][arm.name] = count(counted, arm)
            show_table(f"{name}, KL of an update {counted.moved_kl:.2g}", _COLUMNS, found[name]["arms"])
    write("mismatch", {**headline(found), "runs": found, "arms": {arm.name: arm.about for arm in arms}})


def headline(runs: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest share of decode steps, over all runs, that each idea saves; negative where none does."""
    return {
        figure: max(_saved(run["arms"], less, more) for run in runs.values())
        for figure, (less, more) in _IDEAS.items()
        if all(less in run["arms"] and more in run["arms"] for run in runs.values())
    }


def _saved(arms: Mapping[str, Any], less: str, more: str) -> float:
    return float(1 - arms[more]["steps_per_sample"] / arms[less]["steps_per_sample"])


def count(counted: CountedRun, arm: Arm) -> dict[str, Any]:
    """Return the counts of a run under one way to draft."""
    runs = list(replay(counted, arm))
    steps = sum(len(run.steps) for run in runs)
    tokens = sum(len(run.response) - 1 for run in runs)
    drafted = sum(step.drafted for run in runs for step in run.steps)
    accepted = sum(step.accepted for run in runs for step in run.steps)
    found = [each for run in runs for each in divergences(run.response, run.steps, run.texts)]
    return {
        "steps_per_sample": steps / len(runs),
        "longest": max(len(run.steps) for run in runs),
        "tokens_per_step": tokens / steps,
        "acceptance_rate": accepted / max(drafted, 1),
        "drafted_per_step": drafted / steps,
        "divergences_per_sample": len(found) / len(runs),
        "first_share": len(found) / steps,
        "inside_share": sum(each.drawn for each in found) / steps,
        "lost_share": sum(each.lost for each in found) / steps,
        "by_source": by_source(found, steps),
    }


def by_source(found: Sequence[Divergence], steps: int) -> dict[str, Mapping[str, Any]]:
    """Return divergences by source and length: their share of all, and their tokens as shares of all steps."""
    table: dict[str, Mapping[str, Any]] = {}
    for source in sorted({each.source for each in found}):
        mine = [each for each in found if each.source == source]
        rows = {}
        for name in [*(name for _, name in _LENGTHS), _LONGER, _NEVER]:
            here = [each for each in mine if _bucket(each) == name]
            rows[name] = {
                "count": len(here),
                "inside": sum(each.drawn for each in here) / steps,
                "lost": sum(each.lost for each in here) / steps,
            }
        table[source] = rows
    return table


def _bucket(each: Divergence) -> str:
    if each.length is None:
        return _NEVER
    return next((name for most, name in _LENGTHS if each.length <= most), _LONGER)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--subjects", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--rates", nargs="+", type=float, default=list(LEARNING_RATES))
    names = [arm.name for arm in ARMS]
    parser.add_argument("--arms", nargs="+", choices=names, default=names, metavar="NAME")
    return parser.parse_args()


if __name__ == "__main__":
    main()
