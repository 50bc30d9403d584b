"""Measure how much of a recorded run a given device would generate ahead, and what that is worth.

A benchmark on this machine generates as much ahead as this machine's idle time allows. Here the run that
`make bench SUBJECT=NAME` has recorded is simulated by the step times of another device (cluster.py), with the same
services deciding. Real engines first write the texts of the policy before each update, once.

The regimes are: nothing generated ahead; generation in idle time, with an update that takes a quarter of plain
decoding's step; and a trainer that leaves time for the whole step. The last two regimes have a row without and a
row with forks at near-ties. Ratios compare with plain decoding on the same clock. Writes
runs/bench/device_clock.json.

    make bench NAME=device_clock                # of smollm2
    python -m bench.device_clock smollm2 --device "70B 8xH100"
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean

import numpy as np

from bench.axes.known_texts import vocabulary_of
from bench.device_clock.cluster import ClockedStep, RecordedCluster, RecordedTexts, plain_seconds
from bench.device_clock.old_texts import MOST_FORKS, OldTexts, load_or_write
from bench.report import console, format_value, show_rows, write
from bench.rollout.modelled import DEVICES, H100_8B
from bench.rollout.record import kept_run
from bench.rollout.registry import REGIMES, SMOLLM2, SUBJECTS, Regime, Subject
from bench.rollout.session import FOLDER
from bench.rollout.table import WARM_UP, update_of
from bench.rollout.training import Trajectory
from paceline import SampleKey
from services.bubbles.config import BubblesConfig
from services.step_time.estimator import warm_up

COLUMNS = (
    "regime",
    "generated ahead",
    "tokens a decode step",
    "coverage",
    "acceptance rate",
    "steps of the slowest sample",
    "of plain, modelled",
)
INSTANCES = 2
_NOTHING, _IDLE, _ALL, _FORKS = "nothing", "in idle time", "the whole step", ", forked"
AS_IT_COMES = _IDLE + _FORKS
_LONG = 20.0
"""Update time, in plain rollouts, that suffices to generate any step ahead completely."""


@dataclass(frozen=True, slots=True)
class ClockedRow:
    """Figures of one regime and one amount of work ahead."""

    regime: str
    ahead: str
    steps: tuple[ClockedStep, ...]
    plain: tuple[float, ...]
    """Seconds of plain decoding, by step."""

    @property
    def figures(self) -> tuple[float | None, ...]:
        """Return the columns after the first two."""
        tokens = sum(step.tokens for step in self.steps)
        drafted = sum(step.drafted for step in self.steps)
        return (
            tokens / sum(step.decode_steps for step in self.steps),
            sum(step.covered for step in self.steps) / tokens,
            sum(step.accepted for step in self.steps) / drafted if drafted else None,
            fmean(step.most_decode_steps for step in self.steps),
            sum(self.plain) / sum(step.seconds for step in self.steps),
        )


def main() -> None:
    """Simulate the run in each regime, then show and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("subject", nargs="?", choices=list(SUBJECTS), default=SMOLLM2.name)
    parser.add_argument("--device", choices=list(DEVICES), default=H100_8B)
    given = parser.parse_args()
    subject = SUBJECTS[given.subject]
    rows = []
    for row in clocked(subject, given.device):
        rows.append(row)
        console().print(
            f"device_clock: {row.regime}, {row.ahead}: {row.figures[-1]:.2f} of plain", highlight=False
        )
    lines = [[row.regime, row.ahead, *map(format_value, row.figures)] for row in rows]
    show_rows(f"{subject.name} on the clock of {given.device}", COLUMNS, lines)
    figures = {
        f"{name}_{row.regime}".replace(" ", "_").replace("-", "_"): value
        for row in rows
        if row.ahead == AS_IT_COMES
        for name, value in (("tokens_per_step", row.figures[0]), ("speedup_vs_plain", row.figures[-1]))
    }
    regimes, manners = (
        list(dict.fromkeys(names)) for names in zip(*[(r.regime, r.ahead) for r in rows], strict=True)
    )
    speeds = {(row.regime, row.ahead): format_value(row.figures[-1]) for row in rows}
    brief = [[manner, *(speeds[regime, manner] for regime in regimes)] for manner in manners]
    head = [f"generated ahead; times as fast as plain decoding, modelled {given.device}", *regimes]
    tables = {"rows": {"columns": COLUMNS, "rows": lines}, "brief": {"columns": head, "rows": brief}}
    data = [{**asdict(row), "figures": row.figures} for row in rows]
    write("device_clock", {**figures, "options": vars(given), "tables": tables, "rows": data})


def clocked(subject: Subject, device: str) -> Iterator[ClockedRow]:
    """Yield the rows of a subject's recorded run. RunMissingError if no run is kept."""
    place = FOLDER / subject.name
    run = kept_run(subject, place)
    before = load_or_write(
        run,
        place,
        subject.model,
        subject.kv_bytes,
        lambda step: console().print(f"device_clock: texts before step {step} are written", highlight=False),
    )
    # This imports numba, and the engine must be imported before numba.
    warm_up()
    vocabulary = vocabulary_of(subject.model)
    for name in subject.regimes:
        texts = recorded_texts(run.cut(REGIMES[name]), before, REGIMES[name])
        yield from rows_of(name, texts, device, vocabulary)


def rows_of(
    regime: str, texts: Sequence[RecordedTexts], device: str, vocabulary: int
) -> Iterator[ClockedRow]:
    """Yield the rows of a regime. The first step is not counted, because nothing can be known before it."""
    table = DEVICES[device].steps
    plain = tuple(plain_seconds(each, table, vocabulary, INSTANCES) for each in texts)[WARM_UP:]
    update = update_of(fmean(plain))
    for ahead, bubbles, seconds, forks in (
        (_NOTHING, None, update, 0),
        (_IDLE, BubblesConfig(), update, 0),
        (AS_IT_COMES, BubblesConfig(), update, MOST_FORKS),
        (_ALL, BubblesConfig(), _LONG * fmean(plain), 0),
        (_ALL + _FORKS, BubblesConfig(), _LONG * fmean(plain), MOST_FORKS),
    ):
        cluster = RecordedCluster(table, vocabulary, INSTANCES, texts, seconds, bubbles, forks)
        yield ClockedRow(regime, ahead, tuple(cluster.run())[WARM_UP:], plain)


def recorded_texts(
    trajectory: Trajectory, before: Sequence[OldTexts], regime: Regime
) -> tuple[RecordedTexts, ...]:
    """Return the steps of a part of the run as texts by cell."""
    found, most = [], regime.max_tokens
    for step, old in zip(trajectory.steps, before, strict=True):
        cells = {
            (place, slot): SampleKey(group.prompt_id, slot)
            for place, group in enumerate(step.groups)
            for slot in range(group.samples)
        }
        found.append(
            RecordedTexts(
                step=step.step,
                prompt_ids=tuple(group.prompt_id for group in step.groups),
                prompts=tuple(tuple(map(int, group.prompt_token_ids)) for group in step.groups),
                seeds={cell: step.samples[key].seed for cell, key in cells.items()},
                responses={cell: step.samples[key].token_ids.astype(np.int32) for cell, key in cells.items()},
                before={cell: old[key].response[:most] for cell, key in cells.items() if key in old},
                forks={
                    cell: [
                        replace(fork, response=fork.response[:most])
                        for fork in old[key].forks
                        if most is None or fork.at < most
                    ]
                    for cell, key in cells.items()
                    if key in old
                },
            )
        )
    return tuple(found)


if __name__ == "__main__":
    main()
