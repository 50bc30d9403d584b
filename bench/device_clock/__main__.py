"""Compare plain vLLM, vLLM's own drafts and Paceline on the clock of a device, with the texts of a recorded run.

A benchmark on this machine generates as much ahead as this machine's idle time allows. Here the run that
`make bench SUBJECT=NAME` has recorded is simulated by the step times of another device. Paceline's services decide
as they would there (cluster.py), and vLLM's drafts come from the code that vLLM calls (stock.py). Real engines
first write the texts of the policy before each update, once.

The rows (rows.py) are: plain decoding; vLLM's methods, at their defaults and at ours; Paceline with nothing
generated ahead, in idle time, with a trainer that leaves time for the whole step, and with a trainer that needs the
instances' devices; each of the last three also with texts to other noise; and training one step off. Each is
simulated at both ends of the band of step times (bench/rollout/modelled.py). The update takes a quarter of plain
decoding's training step. Rows are kept, and an interrupted call continues after them.
Writes runs/bench/device_clock.json.

    make bench NAME=device_clock                # of smollm2
    python -m bench.device_clock smollm2 --device "70B 8xH100"
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.axes.known_texts import vocabulary_of
from bench.device_clock.old_texts import load_or_write
from bench.device_clock.recording import ClockedStep, recorded_texts, refused_share, with_other_noise
from bench.device_clock.rows import (
    COLOCATED,
    COLUMNS,
    COUPLED,
    ONE_STEP_OFF,
    OTHER_NOISE,
    PACELINE,
    PLAIN_ONE_STEP_OFF,
    STOCK_ROWS,
    ClockedRegime,
    ClockedRow,
    Remember,
    Steps,
    best_vllm,
    count_rows,
    rows_of,
)
from bench.device_clock.stock import DraftMethod, method_of, ngram_lookup
from bench.report import BenchProgress, format_value, keep, option_parser, say, show_rows, write
from bench.rollout.cells import cell_key, code_hash
from bench.rollout.modelled import DEVICES, H100_8B
from bench.rollout.record import kept_run
from bench.rollout.registry import ARCTIC, REGIMES, SMOLLM2, SUBJECTS, SYSTEMS, Regime, Subject
from bench.rollout.session import FOLDER, package_missing
from services.step_time.estimator import warm_up

HALF = "long tail, half"
GOALS = {
    "tokens_per_step_long_tail": "at least 4",
    "tokens_per_step_latency_bound": "at least 5",
    "speedup_vs_plain_long_tail": "at least 2.5",
    "speedup_vs_best_vllm_long_tail": "at least 1.5",
}
_BRIEF = (
    PACELINE,
    COUPLED,
    "paceline, nothing ahead",
    "paceline, whole step, no forks",
    "paceline, whole step",
)
_KEPT = Path("runs/bench/device_clock")
_CODE = [Path("bench/axes/known_texts.py"), *map(Path, ("bench/device_clock", "services", "kernels"))]
_LOCK = Path("requirements/cpu.lock")


@dataclass(frozen=True, slots=True)
class ClockedRun:
    """Inputs of all rows: the recorded run by regime, and the drafters of vLLM."""

    hash: str
    """Hash of the recorded run."""
    regimes: Sequence[ClockedRegime]
    vocabulary: int
    kl: float
    """Mean KL of an update after the first step, in nats a token."""
    methods: Mapping[str, Callable[[], DraftMethod]]
    absent: str
    """Reason why vLLM's suffix decoding is left out, or ""."""


@dataclass(slots=True)
class KeptRows:
    """Steps of rows that an earlier call with the same inputs has computed, in a file."""

    path: Path
    _kept: dict[str, list[dict[str, Any]]] = field(init=False)

    def __post_init__(self) -> None:
        self._kept = json.loads(self.path.read_text()) if self.path.is_file() else {}

    def of(self, regime: str) -> Remember:
        """Return the function that gives the steps of a regime's rows."""

        def remember(system: str, steps: Callable[[], Iterable[ClockedStep]]) -> Steps:
            name = f"{regime}: {system}"
            if name not in self._kept:
                self._kept[name] = [asdict(step) for step in steps()]
                keep(self.path, self._kept)
            return tuple(ClockedStep(**step) for step in self._kept[name])

        return remember


def main() -> None:
    """Simulate the run in each regime, then show and write the tables."""
    parser = option_parser(__doc__)
    parser.add_argument("subject", nargs="?", choices=list(SUBJECTS), default=SMOLLM2.name)
    parser.add_argument("--device", choices=list(DEVICES), default=H100_8B)
    given = parser.parse_args()
    run = prepared(SUBJECTS[given.subject])
    key = cell_key(code_hash(_CODE), _LOCK.read_text(), run.hash, given.device)
    kept, device = KeptRows(_KEPT / f"{key[:16]}.json"), DEVICES[given.device]
    progress = BenchProgress(sum(count_rows(each, run.methods) for each in run.regimes), "device_clock")
    rows = list[ClockedRow]()
    for regime in run.regimes:
        for row in rows_of(regime, device, run.vocabulary, run.methods, kept.of(regime.name)):
            rows.append(row)
            progress.advance(f"{row.regime}, {row.system}: {row.band} of plain")
    found = tables(rows, given.device)
    show_rows(f"{given.subject} on the clock of {given.device}", **found["rows"])
    if run.absent:
        say(f"device_clock: without vLLM's suffix decoding: {run.absent}")
    data = {**figures(rows), **refusals(run.regimes), "kl_of_an_update": run.kl}
    details = [{**asdict(row), "figures": row.figures} for row in rows]
    notes = {"goals": GOALS, "absent": run.absent, "options": vars(given)}
    write("device_clock", {**data, **notes, "tables": found, "rows": details})


def prepared(subject: Subject) -> ClockedRun:
    """Return the inputs of a subject's rows. RunMissingError if no run is kept."""
    place = FOLDER / subject.name
    run = kept_run(subject, place)
    before = load_or_write(
        run,
        place,
        subject.model,
        subject.kv_bytes,
        lambda step: say(f"device_clock: texts before step {step} are written"),
    )
    absent, find = package_missing(SYSTEMS["vllm suffix"].setup), ngram_lookup()
    # This imports numba, and vLLM must be imported before numba.
    warm_up()
    regimes = []
    for regime in (*map(REGIMES.__getitem__, subject.regimes), halved(subject)):
        texts = recorded_texts(run.cut(regime), before, regime)
        regimes.append(ClockedRegime(regime.name, texts, with_other_noise(texts, before, regime)))
    methods = {
        row.name: partial(method_of, row.speculation, ARCTIC, find)
        for row in STOCK_ROWS
        if row.speculation is not None and not (absent and row.speculation["method"] == "suffix")
    }
    kl = fmean(step.moved_kl for step in run.trajectory.steps[1:])
    return ClockedRun(run.hash, regimes, vocabulary_of(subject.model), kl, methods, absent)


def halved(subject: Subject) -> Regime:
    """Return the regime of half of the samples of each prompt, whose other half has other noise."""
    return Regime(
        HALF, "half of the samples of a prompt, to their ends", max(1, subject.options.samples // 2)
    )


def figures(rows: Sequence[ClockedRow]) -> dict[str, float | None]:
    """Return the single figures: of Paceline as it comes, and ratios between rows, by regime.

    `low_` marks the pessimistic end of the band; vLLM's method is the same at both ends.
    """
    found = dict[str, float | None]()
    for regime in dict.fromkeys(row.regime for row in rows):
        own = {row.system: row for row in rows if row.regime == regime}
        place = regime.replace(", ", "_").replace(" ", "_").replace("-", "_")
        ours, best = own[PACELINE], best_vllm(rows, regime)
        found[f"tokens_per_step_{place}"] = ours.tokens_per_step
        found[f"speedup_vs_plain_{place}"] = ours.speedup
        found[f"low_speedup_vs_plain_{place}"] = ours.low_speedup
        found[f"speedup_vs_best_vllm_{place}"] = None if best is None else best.seconds / ours.seconds
        found[f"low_speedup_vs_best_vllm_{place}"] = (
            None if best is None else best.slow_seconds / ours.slow_seconds
        )
        if OTHER_NOISE in own:
            found[f"speedup_vs_other_noise_{place}"] = own[OTHER_NOISE].seconds / ours.seconds
        found[f"colocated_speedup_vs_plain_{place}"] = own[COLOCATED].speedup
        found[f"one_step_off_speedup_{place}"] = fmean(
            step.whole for step in own[PLAIN_ONE_STEP_OFF].steps
        ) / fmean(step.whole for step in own[ONE_STEP_OFF].steps)
    return found


def refusals(regimes: Iterable[ClockedRegime]) -> dict[str, float | None]:
    """Return the shares of draft tokens that are refused before draft and sample differ, by the drafts' noise."""
    both = [each for each in regimes if each.other_noise is not None]
    if not both:
        return {}
    most = max(both, key=lambda each: len(each.texts[0].seeds))
    assert most.other_noise is not None
    return {
        "refused_share": refused_share(most.texts),
        "refused_share_other_noise": refused_share(most.other_noise),
    }


def tables(rows: Sequence[ClockedRow], device: str) -> dict[str, dict[str, Any]]:
    """Return the tables: all rows, rollouts of all systems by regime, and the brief form."""
    lines = [[row.regime, row.system, *map(format_value, row.figures)] for row in rows]
    regimes = list(dict.fromkeys(row.regime for row in rows))
    systems = list(dict.fromkeys(row.system for row in rows))
    speeds = {(row.regime, row.system): row.band for row in rows}
    head = f"rollouts, times as fast as plain decoding, modelled {device}"
    compared = [[system, *(speeds.get((regime, system), "-") for regime in regimes)] for system in systems]
    whole = [regime for regime in regimes if regime != HALF]
    best = {regime: best_vllm(rows, regime) for regime in whole}
    brief = [["vllm's best method", *("-" if (row := best[each]) is None else row.band for each in whole)]]
    brief += [
        [system, *(speeds[regime, system] for regime in whole)] for system in systems if system in _BRIEF
    ]
    return {
        "rows": {"columns": COLUMNS, "rows": lines},
        "compared": {"columns": [head, *regimes], "rows": compared},
        "brief": {"columns": [head, *whole], "rows": brief},
    }


if __name__ == "__main__":
    main()
