"""Measure each step of a subject's recorded run, and what the run's own history is worth as drafts.

The input is the run that `make bench SUBJECT=NAME` has recorded. Each step after the first is decoded as in
bench.axes, with the samples of earlier steps as history and nothing generated ahead. Writes
runs/bench/axes.recorded.json.

    make bench NAME=axes.recorded               # of smollm2
    python -m bench.axes.recorded smollm2-1e-5
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bench.axes.__main__ import band_of
from bench.axes.known_texts import KnownText, plain_seconds, stored, vocabulary_of
from bench.report import format_band, format_value, option_parser, show_rows, write
from bench.rollout.modelled import DEVICES, H100_8B
from bench.rollout.record import kept_run
from bench.rollout.registry import SMOLLM2, SUBJECTS, Subject
from bench.rollout.session import FOLDER
from services.contracts.rollout import StoredRollout
from services.step_time.estimator import warm_up

COLUMNS = (
    "step",
    "tokens, average",
    "longest",
    "reward",
    "KL of the update",
    "tokens a step, history",
    "of plain, modelled",
)


def main() -> None:
    """Show and write the steps of a subject's run."""
    parser = option_parser(__doc__)
    parser.add_argument("subject", nargs="?", choices=list(SUBJECTS), default=SMOLLM2.name)
    subject = SUBJECTS[parser.parse_args().subject]
    warm_up()
    rows = list(steps_of(subject))
    lines = [shown(row) for row in rows]
    table = show_rows(f"recorded run of {subject.name}", COLUMNS, lines)
    later = rows[1:]
    figures = {
        "history_tokens_per_step": fmean(row["tokens_per_step"] for row in later),
        "history_speedup_vs_plain": fmean(row["speedup_vs_plain"] for row in later),
        "history_speedup_vs_plain_low": fmean(row["speedup_vs_plain_low"] for row in later),
        "reward_first": rows[0]["reward"],
        "reward_last": rows[-1]["reward"],
    }
    options = json.loads(json.dumps(asdict(subject.options)))
    write("axes.recorded", {**figures, "options": options, "tables": {"steps": table}})


def shown(row: dict[str, Any]) -> list[str]:
    """Return the cells of a table row as text; the last two figures are the ends of a band."""
    *figures, high, low = row.values()
    return [*map(format_value, figures), format_band(high, low)]


def steps_of(subject: Subject, folder: Path = FOLDER) -> Iterator[dict[str, Any]]:
    """Yield the figures of each step of the recorded run. RunMissingError if no run is kept."""
    run, vocabulary = kept_run(subject, folder / subject.name), vocabulary_of(subject.model)
    device, history = DEVICES[H100_8B].steps, list[StoredRollout]()
    for step in run.trajectory.steps:
        responses = {key: sample.token_ids.astype(np.int32) for key, sample in step.samples.items()}
        texts = [
            KnownText(key.prompt_id, step.samples[key].seed, tokens) for key, tokens in responses.items()
        ]
        found, low = band_of(texts, history, vocabulary) if history else (None, None)
        yield {
            "step": step.step,
            "tokens_mean": fmean(map(len, responses.values())),
            "tokens_max": max(map(len, responses.values())),
            "reward": step.reward,
            "kl": step.moved_kl,
            "tokens_per_step": None if found is None else found.tokens_per_step,
            "speedup_vs_plain": None if found is None else plain_seconds(texts, device) / found.seconds,
            "speedup_vs_plain_low": low,
        }
        history += [
            stored(key.prompt_id, key.slot, step.samples[key].seed, tokens, step.step)
            for key, tokens in responses.items()
        ]


if __name__ == "__main__":
    main()
