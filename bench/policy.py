"""The step-time estimator and the modes of speculation on the tinymath model.

Measures the engine as an instance does when it starts; then decodes batches whose drafts are the true responses
with a share of wrong tokens: plainly, with every fixed draft length, with some of them when the toggle says so, as
the solver's table has it, and as planned. All ways take turns in one process on one core, and must give the same
tokens; time is that process's own processor time, so that others on the machine take little part in it.

A plan and its drafters go through all rounds of a cell, as an instance goes through the steps of a run. In the
first round they know nothing, so it is reported separately. In the others each step counts at the median time of
its kind (see bench/accounting.py), with the figures as measured and their repeatability beside it.
Writes runs/bench/policy.json.

    python -m bench.policy [--rounds 7] [--samples 8,32,128] [--w4-steps 8] [--model DIR]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np

from bench import w4
from bench.accounting import TimedRound, TimedStep, accounted, step_times
from bench.report import Figures, cores, format_value, show_rows, write
from services.contracts.knobs import Knobs
from services.contracts.sampling import Sampling
from services.generation.drafters.reference.drafter import ReferenceDrafter
from services.generation.engine.types import EngineOptions, EngineRequest, EngineSampleState
from services.generation.speculation.batch_sizes import sizes_up_to
from services.generation.speculation.drafter import DraftContext, Proposals
from services.generation.speculation.knob_driven_planner import KnobDrivenPlanner
from services.generation.speculation.plan import FixedLengthPlanner, StepShape
from services.generation.speculation.speculation import DraftPlanner, Speculation
from services.platform.heap import keep_freed_memory
from services.step_time.estimator import StepTimeEstimator
from services.step_time.prior import MeasuredStep

_MOST = 128
_WINDOW, _MARGIN = 16, 0.02
_LENGTHS = (1, 2, 4, 8, 12, 16)
# Lengths that the toggle is tried with.
_TOGGLED = (4, 16)
WRONG = (0.02, 0.15, 0.4, 0.95)
"""Shares of wrong tokens in the drafts: from nearly true, as reused rollouts are, to as good as useless."""
_PROMPT, _RESPONSE = 24, 160
# Samples that verify as many rows together as a large batch.
_SHARED = 4
# Of a round of small batches: they are over sooner than they can be timed.
_LEAST_SAMPLES = 32
_TIMED = 256
_GOALS = {
    "step_time_error_median": "<= 0.08",
    "step_time_error_p90": "<= 0.25",
    "planner_vs_best_fixed_min": ">= 0.97",
    "planner_us_256": "<= 150",
    "worst_ratio_vs_plain": ">= 0.98",
    "planner_worst_vs_plain": "",
    "planner_vs_best_fixed_as_measured": "",
    "worst_ratio_vs_plain_as_measured": "",
    "planner_vs_best_fixed_cold": "",
    "worst_ratio_vs_plain_cold": "",
    "repeatability_p90": "",
    "repeatability_p90_as_measured": "",
    "self_w4_acceptance": ">= 0.96",
}
# Heads of the table, short enough for a terminal; "x": over plain decoding.
_COLUMNS = {
    "samples": "samples",
    "wrong": "wrong",
    "plain_rate": "plain/s",
    "best_fixed": "best",
    "best_fixed_vs_plain": "best x",
    "planner_vs_plain": "planner x",
    "planner_vs_best_fixed": "of best",
    "planner_as_measured": "measured",
    "planner_cold": "cold",
    "toggle_worst": "worst toggle",
    "toggle_vs_plain": "toggle x",
    "toggle_as_measured": "measured",
    "toggle_cold": "cold",
}
_NOTE = (
    "planner_us_256 is a whole decision for 256 samples, 2 drafters and 16 tokens: from proposals to token lists."
    " worst_ratio_vs_plain is the toggle's, over all batch sizes, draft lengths and drafters. A plan's rate is"
    " tokens a second, drafters and planning included, each step at the median time of its kind; of ..._as_measured"
    " it is the median of its rounds, and of ..._cold that of the first round, in which plans and drafters know"
    " nothing. repeatability_p90...: 9 of 10 rates over the plain one differ by less between the even and the odd"
    " rounds. step_time_error... is of the planner's estimator before it learns from the step."
)


@dataclass(slots=True)
class MeasuredRates:
    """A round of one plan."""

    responses: dict[str, list[int]] = field(default_factory=dict)
    seconds: float = 0.0
    steps: list[TimedStep] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    """Relative errors of predicted step times."""

    @property
    def round(self) -> TimedRound:
        """For the account."""
        return TimedRound(self.steps, self.seconds - sum(step.seconds for step in self.steps))


class Ignored:
    """Draft metrics that nobody reads."""

    def verified(self, drafter: str, drafted: int, accepted: int) -> None:
        """Nothing."""

    def fault(self, drafter: str) -> None:
        """Raise: a benchmark must not continue with a broken drafter."""
        raise RuntimeError(f"drafter {drafter} failed")


def main() -> None:
    """Measure, show and write."""
    arguments = _arguments()
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(cores()[-1])}
    # As instances do.
    keep_freed_memory()
    from services.generation.engine.core import Engine
    from services.generation.engine.warmup import warm_up

    options = EngineOptions(
        str(arguments.model),
        dtype="float32",
        max_num_seqs=_MOST,
        max_model_len=1024,
        kv_cache_memory_bytes=1 << 30,
        # A round must not find the prompts of the one before.
        enable_prefix_caching=False,
    )
    engine = Engine(options)
    warm_up(engine)
    _make_kernels(engine)
    from services.generation.engine.sweep import measure_steps

    sweep = measure_steps(engine, arguments.seconds, time.process_time)
    cells = _cells(engine, sweep, list(product(arguments.samples, arguments.wrong)), arguments.rounds)
    engine.shutdown()
    errors = [each for cell in cells for each in cell.pop("step_time_errors")]
    quantized, why = _quantized(arguments.w4_steps, arguments.model)
    figures: dict[str, Any] = {
        "step_time_error_median": median(errors),
        "step_time_error_p90": _p90(errors),
        "planner_vs_best_fixed_min": min(cell["planner_vs_best_fixed"] for cell in cells),
        "planner_us_256": _decision_microseconds(sweep),
        "worst_ratio_vs_plain": min(cell["toggle_vs_plain"] for cell in cells),
        "planner_worst_vs_plain": min(cell["planner_vs_plain"] for cell in cells),
        "planner_vs_best_fixed_as_measured": min(cell["planner_as_measured"] for cell in cells),
        "worst_ratio_vs_plain_as_measured": min(cell["toggle_as_measured"] for cell in cells),
        "planner_vs_best_fixed_cold": min(cell["planner_cold"] for cell in cells),
        "worst_ratio_vs_plain_cold": min(cell["toggle_cold"] for cell in cells),
        "repeatability_p90": _p90(each for cell in cells for each in cell["repeats"]),
        "repeatability_p90_as_measured": _p90(each for cell in cells for each in cell["repeats_as_measured"]),
        "self_w4_acceptance": quantized.get("self_w4_acceptance"),
    }
    rows = [[format_value(cell[name]) for name in _COLUMNS] for cell in cells]
    show_rows("policy: cells", tuple(_COLUMNS.values()), rows)
    goals = [(name, format_value(figures[name]), goal) for name, goal in _GOALS.items()]
    show_rows("policy", ("figure", "value", "goal"), goals)
    print(_NOTE, f"quantized: {why}" if why else "")
    write(
        "policy",
        {
            **figures,
            "quantized": quantized or why,
            "cells": cells,
            "sweep": [each.model_dump() for each in sweep],
            "note": _NOTE,
            "rounds": arguments.rounds,
        },
    )


def _p90(values: Iterable[float]) -> float:
    return float(np.quantile(list(values), 0.9))


def _quantized(steps: int, model: Path) -> tuple[Figures, str]:
    """Return the quantized copy's figures over a training run, and why there are none where there are none."""
    if not steps:
        return {}, "not measured: --w4-steps is 0"
    try:
        return w4.measure(w4.Given(steps=steps, model=model)), ""
    except Exception as error:
        # The other figures took minutes; they are worth keeping without it.
        return {}, f"not measured: {error!r}"


def _make_kernels(engine: Any) -> None:
    """Run one step for each number of verified tokens that plans use, so that its kernels exist.

    A CPU's kernels are made for a number of rows when it first comes, which takes as long as some steps. That is of
    the process, once, and says nothing of plans.
    """
    sampling = Sampling(max_tokens=engine.limits.max_model_len - 1, ignore_eos=True)
    samples = [EngineRequest(f"rows-{i}", (i,), (), sampling, i) for i in range(_SHARED)]
    for sample in samples:
        engine.add(sample)
    while len(engine.decoding()) < len(samples):
        engine.step()
    for rows in sizes_up_to(min(engine.row_capacity, _MOST * (1 + _WINDOW))):
        each, more = divmod(max(0, rows - len(samples)), len(samples))
        engine.put_drafts(
            {f"rows-{i}": [0] * (each + (i < more)) for i in range(len(samples)) if each or i < more}
        )
        engine.step()
    engine.abort(sample.sample_id for sample in samples)
    while engine.has_work:
        engine.step()


def _cells(
    engine: Any, sweep: Sequence[MeasuredStep], shapes: Sequence[tuple[int, float]], rounds: int
) -> list[dict[str, Any]]:
    """Measure batches of these sizes and shares of wrong tokens; say after each how long the others will take."""
    began, cells = time.monotonic(), list[dict[str, Any]]()
    for samples, wrong in shapes:
        cells.append(_cell(engine, sweep, samples, wrong, rounds))
        gone = time.monotonic() - began
        left = gone / len(cells) * (len(shapes) - len(cells))
        batch = f"{samples} samples, {wrong:.0%} wrong"
        print(f"policy: {batch}; {gone:.0f} s gone, about {left:.0f} s left", flush=True)
    return cells


def _cell(
    engine: Any, sweep: Sequence[MeasuredStep], samples: int, wrong: float, rounds: int
) -> dict[str, Any]:
    """All plans on the same batches, in turns.

    A round is a single large batch or several small ones.
    """
    random = Random(samples)
    vocab = engine.limits.vocab_size
    requests = [
        EngineRequest(
            f"{i}",
            tuple(random.randrange(3, vocab) for _ in range(_PROMPT)),
            (),
            # The tail of a real step: samples end at different times.
            Sampling(max_tokens=random.randrange(_RESPONSE // 4, _RESPONSE), ignore_eos=True),
            random.getrandbits(60),
        )
        for i in range(samples * max(1, _LEAST_SAMPLES // samples))
    ]
    truth = _round(engine, requests, samples, None).responses
    drafted = [
        replace(request, given=spoilt(truth[request.sample_id], wrong, vocab, random)) for request in requests
    ]
    ways = {
        name: None
        if plan is None
        else Speculation([ReferenceDrafter()], plan, vocab, Ignored(), time.process_time)
        for name, plan in plans(sweep)
    }
    made: dict[str, list[TimedRound]] = {name: [] for name in ways}
    errors: list[float] = []
    for _ in range(1 + rounds):
        for name in random.sample(list(ways), len(ways)):
            found = _round(engine, drafted, samples, ways[name])
            if found.responses != truth:
                raise RuntimeError(f"plan {name} changed tokens")
            made[name].append(found.round)
            if name == "planner":
                errors += found.errors
    tokens = sum(map(len, truth.values()))
    warm = {name: each[1:] for name, each in made.items()}
    compared, measured = ComparedRates.by_kind(tokens, warm), ComparedRates.as_measured(tokens, warm)
    # Plans of fixed length have nothing to learn.
    first = {name: each[:1] if name in _learners(ways) else warm[name] for name, each in made.items()}
    cold = ComparedRates.by_kind(tokens, first)
    halves = [{name: each[half::2] for name, each in warm.items()} for half in (0, 1)]
    best, worst = compared.best_fixed, compared.worst_toggle
    return {
        "samples": samples,
        "wrong": wrong,
        "plain_rate": compared.rates["plain"],
        "best_fixed": best,
        "best_fixed_vs_plain": compared.ratio(best, "plain"),
        "planner_vs_plain": compared.ratio("planner", "plain"),
        # Of the lengths that the toggle was tried with, the one that came off worst.
        "toggle_worst": worst,
        "toggle_vs_plain": compared.ratio(worst, "plain"),
        "planner_vs_best_fixed": compared.planner,
        "planner_as_measured": measured.planner,
        "toggle_as_measured": measured.ratio(measured.worst_toggle, "plain"),
        "planner_cold": cold.planner,
        "toggle_cold": cold.ratio(cold.worst_toggle, "plain"),
        "repeats": _differences(*(ComparedRates.by_kind(tokens, half) for half in halves)),
        "repeats_as_measured": _differences(*(ComparedRates.as_measured(tokens, half) for half in halves)),
        "rates": compared.rates,
        "solver_vs_plain": compared.ratio("solver", "plain"),
        "step_time_errors": errors,
        "beside_ms": {name: 1e3 * median(each.beside for each in found) for name, found in warm.items()},
    }


def _learners(ways: Iterable[str]) -> set[str]:
    return {name for name in ways if name in ("planner", "solver") or name.startswith("toggle")}


def _differences(one: ComparedRates, other: ComparedRates) -> list[float]:
    """By how much rates over the plain one differ, as shares."""
    names = [name for name in one.rates if name != "plain"]
    return [abs(one.ratio(name, "plain") / other.ratio(name, "plain") - 1) for name in names]


@dataclass(frozen=True, slots=True)
class ComparedRates:
    """Tokens a second by way."""

    rates: Mapping[str, float]

    @classmethod
    def by_kind(cls, tokens: int, rounds: Mapping[str, Sequence[TimedRound]]) -> ComparedRates:
        """Return tokens a second of rounds with equal tokens, each step counted at the median time of its kind."""
        times = step_times(each for made in rounds.values() for each in made)
        return cls({name: tokens / accounted(made, times) for name, made in rounds.items()})

    @classmethod
    def as_measured(cls, tokens: int, rounds: Mapping[str, Sequence[TimedRound]]) -> ComparedRates:
        """Return the median of rounds that all give so many tokens."""
        return cls({name: tokens / median(each.seconds for each in made) for name, made in rounds.items()})

    def ratio(self, name: str, other: str) -> float:
        """Return the ratio of two rates."""
        return self.rates[name] / self.rates[other]

    @property
    def best_fixed(self) -> str:
        """The fixed length with the highest rate."""
        return max(self._kind("fixed"), key=self.rates.__getitem__)

    @property
    def worst_toggle(self) -> str:
        """The toggled length with the lowest."""
        return min(self._kind("toggle"), key=self.rates.__getitem__)

    @property
    def planner(self) -> float:
        """The planner against the best fixed length, which is none where none pays."""
        return self.rates["planner"] / max(self.rates[self.best_fixed], self.rates["plain"])

    def _kind(self, kind: str) -> list[str]:
        return [name for name in self.rates if name.startswith(kind)]


def plans(sweep: Sequence[MeasuredStep]) -> Iterator[tuple[str, DraftPlanner | None]]:
    """By name."""
    yield "plain", None
    for length in _LENGTHS:
        yield f"fixed {length}", FixedLengthPlanner(length)
    for length in _TOGGLED:
        yield f"toggle {length}", _steered(sweep, "toggle", length)
    yield "solver", _steered(sweep, "solver", _WINDOW)
    yield "planner", _steered(sweep, "planner", _WINDOW)


def _steered(sweep: Sequence[MeasuredStep], mode: Any, cap: int) -> KnobDrivenPlanner:
    """Return the plan of an instance whose knobs say so."""
    knobs = Knobs(mode=mode, draft_cap=cap, margin=_MARGIN)
    return KnobDrivenPlanner(knobs, StepTimeEstimator(sweep), lambda _: None)


def spoilt(tokens: Sequence[int], wrong: float, vocab: int, random: Random) -> tuple[int, ...]:
    """Return a response with a share of other tokens in it."""
    return tuple(
        (token + random.randrange(1, vocab)) % vocab if random.random() < wrong else token for token in tokens
    )


def _round(
    engine: Any, requests: Sequence[EngineRequest], samples: int, speculation: Speculation | None
) -> MeasuredRates:
    """Return the instance's loop without its streams, one batch of so many samples after the other.

    A batch is timed from the first step in which all of its samples decode.
    """
    measured = MeasuredRates({request.sample_id: [] for request in requests})
    for first in range(0, len(requests), samples):
        batch = requests[first : first + samples]
        for request in batch:
            engine.add(request)
            if speculation is not None:
                speculation.begin(DraftContext(request.sample_id, request.prompt, request.given))
        while len(engine.decoding()) < len(batch):
            _record(measured, engine.step(), speculation)
        began = time.process_time()
        while engine.has_work:
            _step(engine, measured, speculation)
        measured.seconds += time.process_time() - began
    return measured


def _step(engine: Any, measured: MeasuredRates, speculation: Speculation | None) -> None:
    """Run one step of the loop and return the time that the engine took."""
    samples, shape, tokens = engine.load.running, None, 0
    if speculation is not None and not speculation.skips_again(samples):
        states = engine.decoding()
        drafts: Mapping[str, Sequence[int]] = speculation.drafts(states, engine.row_capacity)
        engine.put_drafts(drafts)
        shape = speculation.shape(states, drafts)
        tokens = sum(map(len, drafts.values()))
    began = time.process_time()
    steps = engine.step()
    seconds = time.process_time() - began
    if speculation is not None and shape is not None:
        if isinstance(speculation.plan, KnobDrivenPlanner):
            predicted = speculation.plan.step_time.seconds(shape.requests, shape.rows, shape.context)
            measured.errors.append(abs(predicted / seconds - 1))
        speculation.stepped(shape, seconds)
    measured.steps.append(TimedStep(samples, tokens, seconds))
    _record(measured, steps, speculation)


def _record(measured: MeasuredRates, steps: Sequence[Any], speculation: Speculation | None) -> None:
    for step in steps:
        measured.responses[step.sample_id] += step.token_ids
        if speculation is not None:
            speculation.learn(step)
            if step.finish is not None:
                speculation.end(step.sample_id, measured.responses[step.sample_id])


def _decision_microseconds(sweep: Sequence[MeasuredStep], repeats: int = 200) -> float:
    """Median time of a decision for 256 samples."""
    random = np.random.default_rng(0)
    samples = [EngineSampleState(f"s{i}", [1] * 100, [1] * 200, 100) for i in range(_TIMED)]

    def made() -> Proposals:
        shape = (_TIMED, _WINDOW)
        return Proposals(np.ones(shape, np.int32), random.uniform(0.5, 1, shape))

    proposals = {"reference": made(), "suffix": made()}
    plan = _steered(sweep, "planner", _WINDOW)
    taken = []
    for i in range(repeats):
        # As in an instance: every step is measured, so the estimator is solved again.
        plan.stepped(StepShape(_TIMED, _TIMED * (1 + i % _WINDOW), 300 * _TIMED), 0.02 + 1e-5 * (i % 7))
        began = time.perf_counter()
        plan.choose(samples, proposals)
        taken.append(time.perf_counter() - began)
    return median(taken) * 1e6


def _arguments() -> argparse.Namespace:
    def numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
        return lambda text: [kind(each) for each in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("examples/tinymath/model"))
    parser.add_argument("--rounds", type=int, default=7, help="after the first, in which plans know nothing")
    parser.add_argument("--seconds", type=float, default=2.0, help="of the sweep")
    parser.add_argument("--samples", type=numbers(int), default=[8, 16, 32, 64, _MOST], help="batch sizes")
    parser.add_argument(
        "--w4-steps", type=int, default=8, help="of the run that drafts with the quantized copy"
    )
    parser.add_argument("--wrong", type=numbers(float), default=list(WRONG), help="shares of wrong tokens")
    arguments = parser.parse_args()
    if arguments.rounds < 2 or max(arguments.samples) > _MOST or min(arguments.samples) < 1:
        parser.error(f"at least two rounds; batches of 1 to {_MOST}")
    return arguments


if __name__ == "__main__":
    main()
