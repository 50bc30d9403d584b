"""Count the tokens that change with the shape of a batch: in float32, in bfloat16, and with batch_invariant.

A sample's noise fixes its tokens, so that two runs differ only where rounding decides between two tokens. The
engine decodes the samples in batches, then one at a time, then with their own responses as drafts, and compares
each run with the first. A difference is a near-tie if each run drew the runner-up of the other. Writes
runs/bench/precision.json.

    scripts/real-model                               # makes the default model, SmolLM2-135M-Instruct
    python -m bench.precision [--model runs/models/smollm2] [--samples 32] [--max-tokens 256]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.coupled.engine_process import EngineMeasurement, EngineProcess, EngineRound, RunnerUp
from bench.report import format_value, option_parser, say, show_rows, write
from examples.tinymath.curriculum import curriculum_of
from services.contracts.sampling import Sampling
from services.generation.engine.types import EngineOptions, EngineRequest


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """Tokens of a run by sample, and the runner-up of each token."""

    tokens: Mapping[str, Sequence[int]]
    runners_up: Mapping[str, Sequence[RunnerUp]]


@dataclass(frozen=True, slots=True)
class Divergence:
    """First difference of a sample: each run's margin, and whether each drew the other's runner-up."""

    sample: str
    position: int
    margin: float
    """The larger margin of the two runs, in nats."""
    swapped: bool


@dataclass(frozen=True, slots=True)
class Differences:
    """Comparison of two runs. Tokens after a sample's first difference have another context and do not count."""

    compared: int
    samples: int
    found: tuple[Divergence, ...]

    @property
    def per_thousand(self) -> float:
        """Return the number of tokens in a thousand that differ although all tokens before them are equal."""
        return 1000 * len(self.found) / self.compared if self.compared else 0.0

    @property
    def largest_margin(self) -> float:
        """Return the largest margin of a difference, in nats; 0 without differences."""
        return max((each.margin for each in self.found), default=0.0)

    @property
    def no_near_ties(self) -> int:
        """Return the number of differences in which a run's other token was not the runner-up."""
        return sum(not each.swapped for each in self.found)


def compare(base: JudgedRun, other: JudgedRun) -> Differences:
    """Compare two runs of the same samples. ValueError if their samples differ, or one lacks runners-up."""
    if base.tokens.keys() != other.tokens.keys():
        raise ValueError(
            f"the runs have other samples: {sorted(base.tokens.keys() ^ other.tokens.keys())[:5]}"
        )
    compared, found = 0, list[Divergence]()
    for name, ours in base.tokens.items():
        theirs = other.tokens[name]
        for run in (base, other):
            if len(run.runners_up[name]) != len(run.tokens[name]):
                raise ValueError(f"sample {name} has {len(run.runners_up[name])} runners-up")
        both = range(min(len(ours), len(theirs)))
        at = next((place for place in both if ours[place] != theirs[place]), None)
        if at is None:
            compared += len(both)
            continue
        compared += at + 1
        here, there = base.runners_up[name][at], other.runners_up[name][at]
        swapped = here.token == theirs[at] and there.token == ours[at]
        found.append(Divergence(name, at, max(here.margin, there.margin), swapped))
    return Differences(compared, len(base.tokens), tuple(found))


def joined(parts: Iterable[Differences]) -> Differences:
    """Return the sum of several comparisons."""
    known = list(parts)
    return Differences(
        sum(each.compared for each in known),
        sum(each.samples for each in known),
        tuple(one for each in known for one in each.found),
    )


def same_share(per_thousand: float, length: int) -> float:
    """Return the share of samples of `length` tokens without a difference, if each token differs alike."""
    share: float = (1 - per_thousand / 1000) ** length
    return share


class PrecisionMode(NamedTuple):
    """Name in figures, dtype and `batch_invariant` of an engine."""

    name: str
    dtype: str
    batch_invariant: bool


_WINDOW = 8
FAST = "bfloat16"
BASE, ALONE, DRAFTED = "the batches that are compared with", "one sample", f"{_WINDOW} drafts a sample"
"""Shapes of batches."""
MODES = {
    "float32": PrecisionMode("float32", "float32", False),
    FAST: PrecisionMode("bfloat16", "bfloat16", False),
    "bfloat16, batch_invariant": PrecisionMode("batch_invariant", "bfloat16", True),
}
"""Engines by their names in the table."""
_LENGTHS = (1_000, 8_000)
COLUMNS = (
    "precision",
    "batch compared with",
    "tokens",
    "differ",
    "in a thousand",
    "no near-ties",
    "largest margin, nats",
    "step, of bfloat16's",
)


@dataclass(frozen=True, slots=True)
class MeasuredMode:
    """Differences by shape of batch, and the median time of a step of each shape, in seconds.

    `step_seconds` has the batches that are compared with, too. Only steps with the most rows count.
    """

    differences: Mapping[str, Differences]
    step_seconds: Mapping[str, float]


def main() -> None:
    """Measure each precision, then show and write the figures."""
    given = _arguments()
    if not (given.model / "config.json").is_file():
        sys.exit(f"precision: {given.model} has no model; `scripts/real-model` makes runs/models/smollm2")
    requests = requests_of(given.model, given.samples, given.max_tokens, given.temperature)
    found = {mode: measure(given.model, mode, requests, given.batch, given.alone) for mode in MODES}
    rows = [
        _row(mode, how, each, measured.step_seconds[how] / found[FAST].step_seconds[how])
        for mode, measured in found.items()
        for how, each in measured.differences.items()
    ]
    table = show_rows("precision", COLUMNS, rows)
    figures = figures_of(found)
    show_rows(
        "precision", ("figure", "value"), [(name, format_value(each)) for name, each in figures.items()]
    )
    write("precision", {**figures, "tables": {"differences": table}, "options": _plain(given)})


def measure(
    model: Path, mode: str, requests: Sequence[EngineRequest], batch: int, alone: int
) -> MeasuredMode:
    """Return what each shape of batch changes, against batches of `batch` samples without drafts.

    Only the first `alone` samples are decoded one at a time. WorkerFailed if the engine cannot be built.
    """
    _, dtype, invariant = MODES[mode]
    longest = max(len(each.prompt) + (each.sampling.max_tokens or 0) for each in requests)
    options = EngineOptions(
        str(model),
        dtype=dtype,
        max_num_seqs=batch,
        max_model_len=longest + 1,
        kv_cache_memory_bytes=1 << 30,
        batch_invariant=invariant,
    )
    with closing(EngineProcess(options)) as engine:
        engine.wait()

        seconds = dict[str, float]()

        def run(what: str, order: EngineRound) -> JudgedRun:
            measured = engine.run(order)
            say(f"precision: {mode}, {what}: {measured.tokens} tokens in {measured.seconds:.0f} s")
            seconds[what] = _full_step(measured)
            return JudgedRun(measured.responses, measured.runners_up)

        base = run(BASE, EngineRound(requests, batch))
        drafted = [replace(each, given=tuple(base.tokens[each.sample_id])) for each in requests]
        few = requests[:alone]
        some = JudgedRun(
            {each.sample_id: base.tokens[each.sample_id] for each in few},
            {each.sample_id: base.runners_up[each.sample_id] for each in few},
        )
        verifying = EngineRound(drafted, max(1, batch // 4), "reference", _WINDOW)
        found = {
            ALONE: compare(some, run(ALONE, EngineRound(few, 1))),
            DRAFTED: compare(base, run(DRAFTED, verifying)),
        }
        return MeasuredMode(found, seconds)


def _full_step(measured: EngineMeasurement) -> float:
    """Return the median time of the steps with the most rows, in seconds.

    Drafts are refused at other places in each mode, so that only steps with all drafts are the same work.
    """
    most = max(measured.step_rows)
    steps = zip(measured.step_seconds, measured.step_rows, strict=True)
    return median(took for took, rows in steps if rows == most)


def figures_of(found: Mapping[str, MeasuredMode]) -> dict[str, float]:
    """Return the figures by name, of all comparisons of a precision together."""
    figures = dict[str, float]()
    for mode, measured in found.items():
        name, whole = MODES[mode].name, joined(measured.differences.values())
        figures |= {
            f"{name}_differing_per_thousand": whole.per_thousand,
            f"{name}_no_near_ties": whole.no_near_ties,
            f"{name}_largest_margin": whole.largest_margin,
            f"{name}_compared": whole.compared,
            f"{name}_step_of_{FAST}": measured.step_seconds[BASE] / found[FAST].step_seconds[BASE],
            f"{name}_verifying_step_of_{FAST}": measured.step_seconds[DRAFTED]
            / found[FAST].step_seconds[DRAFTED],
        }
        for length in _LENGTHS:
            figures[f"{name}_same_samples_of_{length}"] = same_share(whole.per_thousand, length)
    return figures


def requests_of(model: Path, count: int, max_tokens: int, temperature: float) -> list[EngineRequest]:
    """Return samples of problems for the model, one a problem."""
    tasks = curriculum_of(model)
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature)
    return [
        EngineRequest(
            f"p{place}",
            tuple(tasks.text.prompt_ids(task.question)),
            (),
            sampling,
            1000 + place,
            near_ties=True,
        )
        for place, task in enumerate(tasks.draw(5, count))
    ]


def _row(mode: str, how: str, each: Differences, step: float) -> tuple[str, ...]:
    cells = (each.compared, len(each.found), each.per_thousand, each.no_near_ties, each.largest_margin, step)
    return mode, how, *map(format_value, cells)


def _plain(given: argparse.Namespace) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()}


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--model", type=Path, default=Path("runs/models/smollm2"))
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--alone", type=int, default=3, help="samples that are decoded one at a time, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
