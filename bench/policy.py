"""The step-time model, the toggle and the draft planner on the tinymath model.

Sweeps the engine and fits the step-time model to a part of the cells; then decodes batches whose drafts are the
true responses with a share of wrong tokens: plainly, with every fixed draft length, with some of them when the
toggle says so, and as planned. All ways take turns in one process on one core, and must give the same tokens; time
is that process's own processor time, so that others on the machine take little part in it.

A plan and its drafters go through all rounds of a cell, as an instance goes through the steps of a run. In the
first one they know nothing: that is told apart. Of the others each step counts at the time that steps of its kind
take (see bench/accounting.py); what was measured as it stands is told beside it, and how well both repeat.
Writes runs/bench/policy.json, and the toggle's boundary over the measured steps as policy.svg.

    python -m bench.policy [--rounds 7] [--samples 8,32,128] [--w4-steps 8] [--model DIR]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np

from bench import boundary, w4
from bench.accounting import Round, Step, accounted, step_times
from bench.report import Figures, cores, format_value, show, show_rows, write
from services.generation.drafting.drafter import DraftContext, Offers
from services.generation.drafting.given import GivenDrafter
from services.generation.drafting.plan import FixedPlan
from services.generation.drafting.row_grid import rows_up_to
from services.generation.drafting.speculation import Plan, Speculation
from services.generation.engine.types import EngineOptions, SampleRequest, SampleState
from services.generation.steering.steered import SteeredPlan
from services.platform.heap import keep_freed_memory
from services.platform.sampling import Sampling
from services.policy.calibration import Fit, calibrate
from services.policy.correction import CorrectedStepTime, Correction
from services.policy.knobs import Knobs
from services.policy.models import architecture_of
from services.policy.probe import Grid, measure_bandwidth, measure_throughput, sweep
from services.policy.step_time import StepTime
from services.policy.sweep import Sweep

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
    "step_time_error_p90": "<= 0.2",
    "planner_vs_best_fixed_min": ">= 0.97",
    "planner_us_256": "<= 200",
    "worst_ratio_vs_plain": ">= 0.98",
    "planner_worst_vs_plain": "",
    "planner_vs_best_fixed_as_measured": "",
    "worst_ratio_vs_plain_as_measured": "",
    "planner_vs_best_fixed_cold": "",
    "worst_ratio_vs_plain_cold": "",
    "repeatability_p90": "",
    "repeatability_p90_as_measured": "",
    "boundary_agreement": "",
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
    "planner_us_256 is a whole decision for 256 samples, 2 drafters and 16 tokens, from offers to lists of tokens."
    " worst_ratio_vs_plain is the toggle's, over all batch sizes, draft lengths and drafters. A plan's rate is"
    " tokens a second, drafters and planning included, each step at the median time of its kind; of ..._as_measured"
    " it is the median of its rounds, and of ..._cold that of the first round, in which plans and drafters know"
    " nothing. repeatability_p90...: 9 of 10 rates over the plain one differ by less between the even and the odd"
    " rounds. Of the boundary's figures see bench/boundary.py."
)


@dataclass(slots=True)
class Measured:
    """A round of one plan."""

    responses: dict[str, list[int]] = field(default_factory=dict)
    seconds: float = 0.0
    steps: list[Step] = field(default_factory=list)

    @property
    def round(self) -> Round:
        """For the account."""
        return Round(self.steps, self.seconds - sum(step.seconds for step in self.steps))


class Ignored:
    """Draft metrics that nobody reads."""

    def verified(self, drafter: str, drafted: int, accepted: int) -> None:
        """Nothing."""

    def fault(self, drafter: str) -> None:
        """A benchmark must not go on with a drafter that is broken."""
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
    swept, fit = _fit(engine, arguments.model, arguments.seconds)
    cells = [
        _cell(engine, fit.step_time, samples, wrong, arguments.rounds)
        for samples in arguments.samples
        for wrong in arguments.wrong
    ]
    found = boundary.speedups(swept.points, fit.step_time)
    picture = Path("runs/bench/policy.svg")
    drawn = boundary.draw(found, fit.step_time, _MARGIN, picture)
    engine.shutdown()
    self_w4, why = _self_w4(arguments.w4_steps, arguments.model)
    figures: dict[str, Any] = {
        "step_time_error_median": fit.held_out.median,
        "step_time_error_p90": fit.held_out.p90,
        "planner_vs_best_fixed_min": min(cell["planner_vs_best_fixed"] for cell in cells),
        "planner_us_256": _decision_microseconds(fit.step_time),
        "worst_ratio_vs_plain": min(cell["toggle_vs_plain"] for cell in cells),
        "planner_worst_vs_plain": min(cell["planner_vs_plain"] for cell in cells),
        "planner_vs_best_fixed_as_measured": min(cell["planner_as_measured"] for cell in cells),
        "worst_ratio_vs_plain_as_measured": min(cell["toggle_as_measured"] for cell in cells),
        "planner_vs_best_fixed_cold": min(cell["planner_cold"] for cell in cells),
        "worst_ratio_vs_plain_cold": min(cell["toggle_cold"] for cell in cells),
        "repeatability_p90": _p90(each for cell in cells for each in cell["repeats"]),
        "repeatability_p90_as_measured": _p90(each for cell in cells for each in cell["repeats_as_measured"]),
        "self_w4_acceptance": self_w4.get("self_w4_acceptance"),
        **boundary.figures(found, _MARGIN),
    }
    rows = [[format_value(cell[name]) for name in _COLUMNS] for cell in cells]
    show_rows("policy: cells", tuple(_COLUMNS.values()), rows)
    goals = [(name, format_value(figures[name]), goal) for name, goal in _GOALS.items()]
    show_rows("policy", ("figure", "value", "goal"), goals)
    show("policy: the fit", fit.step_time.model_dump(exclude={"architecture", "residual"}))
    print(_NOTE, f"self_w4: {why}" if why else "", f"picture: {picture}" if drawn else "no picture")
    write(
        "policy",
        {
            **figures,
            "self_w4": self_w4 or why,
            "cells": cells,
            "step_time": fit.step_time.model_dump(),
            "note": _NOTE,
            "rounds": arguments.rounds,
        },
    )


def _p90(values: Iterable[float]) -> float:
    return float(np.quantile(list(values), 0.9))


def _self_w4(steps: int, model: Path) -> tuple[Figures, str]:
    """The 4-bit twin's figures over a training run, and why there are none where there are none."""
    if not steps:
        return {}, "not measured: --w4-steps is 0"
    try:
        return w4.measure(w4.Given(steps=steps, model=model)), ""
    except Exception as error:
        # The other figures took minutes; they are worth keeping without it.
        return {}, f"not measured: {error!r}"


def _make_kernels(engine: Any) -> None:
    """A step of each number of rows that plans use.

    A CPU's kernels are made for a number of rows when it first comes, which takes as long as some steps. That is of
    the process, once, and says nothing of plans.
    """
    sampling = Sampling(max_tokens=engine.limits.max_model_len - 1, ignore_eos=True)
    samples = [SampleRequest(f"rows-{i}", (i,), (), sampling, i) for i in range(_SHARED)]
    for sample in samples:
        engine.add(sample)
    while len(engine.decoding()) < len(samples):
        engine.step()
    for rows in rows_up_to(min(engine.row_capacity, _MOST * (1 + _WINDOW))):
        each, more = divmod(max(0, rows - len(samples)), len(samples))
        engine.put_drafts(
            {f"rows-{i}": [0] * (each + (i < more)) for i in range(len(samples)) if each or i < more}
        )
        engine.step()
    engine.abort(sample.sample_id for sample in samples)
    while engine.has_work:
        engine.step()


def _fit(engine: Any, model: Path, seconds: float) -> tuple[Sweep, Fit]:
    limits = (_MOST, engine.limits.max_model_len, engine.row_capacity, engine.kv_capacity)
    grid = Grid(seconds=seconds).within(*limits)
    throughput, bandwidth = measure_throughput(engine.dtype), measure_bandwidth()
    swept = sweep(engine, grid, clock=time.process_time)
    return swept, calibrate(architecture_of(model, engine.dtype), throughput, bandwidth, swept)


def _cell(engine: Any, model: StepTime, samples: int, wrong: float, rounds: int) -> dict[str, Any]:
    """All plans on the same batches, in turns.

    A round is a single large batch or several small ones.
    """
    random = Random(samples)
    vocab = engine.limits.vocab_size
    requests = [
        SampleRequest(
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
        else Speculation([GivenDrafter()], plan, vocab, Ignored(), time.process_time)
        for name, plan in plans(model)
    }
    made: dict[str, list[Round]] = {name: [] for name in ways}
    for _ in range(1 + rounds):
        for name in random.sample(list(ways), len(ways)):
            found = _round(engine, drafted, samples, ways[name])
            if found.responses != truth:
                raise RuntimeError(f"plan {name} changed tokens")
            made[name].append(found.round)
    tokens = sum(map(len, truth.values()))
    warm = {name: each[1:] for name, each in made.items()}
    compared, measured = Compared.by_kind(tokens, warm), Compared.as_measured(tokens, warm)
    # Plans of fixed length have nothing to learn.
    first = {name: each[:1] if name in _learners(ways) else warm[name] for name, each in made.items()}
    cold = Compared.by_kind(tokens, first)
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
        "repeats": _differences(*(Compared.by_kind(tokens, half) for half in halves)),
        "repeats_as_measured": _differences(*(Compared.as_measured(tokens, half) for half in halves)),
        "rates": compared.rates,
        "beside_ms": {name: 1e3 * median(each.beside for each in found) for name, found in warm.items()},
    }


def _learners(ways: Iterable[str]) -> set[str]:
    return {name for name in ways if name == "planner" or name.startswith("toggle")}


def _differences(one: Compared, other: Compared) -> list[float]:
    """By how much rates over the plain one differ, as shares."""
    names = [name for name in one.rates if name != "plain"]
    return [abs(one.ratio(name, "plain") / other.ratio(name, "plain") - 1) for name in names]


@dataclass(frozen=True, slots=True)
class Compared:
    """Tokens a second by way."""

    rates: Mapping[str, float]

    @classmethod
    def by_kind(cls, tokens: int, rounds: Mapping[str, Sequence[Round]]) -> Compared:
        """Of rounds that all give so many tokens, each step at the time of its kind."""
        times = step_times(each for made in rounds.values() for each in made)
        return cls({name: tokens / accounted(made, times) for name, made in rounds.items()})

    @classmethod
    def as_measured(cls, tokens: int, rounds: Mapping[str, Sequence[Round]]) -> Compared:
        """The median of rounds that all give so many tokens."""
        return cls({name: tokens / median(each.seconds for each in made) for name, made in rounds.items()})

    def ratio(self, name: str, other: str) -> float:
        """Of two ways' rates."""
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


def plans(model: StepTime) -> Iterator[tuple[str, Plan | None]]:
    """By name."""
    yield "plain", None
    for length in _LENGTHS:
        yield f"fixed {length}", FixedPlan(length)
    for length in _TOGGLED:
        yield f"toggle {length}", _steered(model, "toggle", length)
    yield "planner", _steered(model, "planner", _WINDOW)


def _steered(model: StepTime, mode: Any, cap: int) -> SteeredPlan:
    """The plan of an instance whose knobs say so."""
    knobs = Knobs(mode=mode, draft_cap=cap, margin=_MARGIN)
    step_time = CorrectedStepTime(model, Correction())
    return SteeredPlan(knobs, step_time, lambda _: None)


def spoilt(tokens: Sequence[int], wrong: float, vocab: int, random: Random) -> tuple[int, ...]:
    """A response with a share of other tokens in it."""
    return tuple(
        (token + random.randrange(1, vocab)) % vocab if random.random() < wrong else token for token in tokens
    )


def _round(
    engine: Any, requests: Sequence[SampleRequest], samples: int, speculation: Speculation | None
) -> Measured:
    """The instance's loop without its streams, one batch of so many samples after the other.

    A batch is timed from the first step in which all of its samples decode.
    """
    measured = Measured({request.sample_id: [] for request in requests})
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


def _step(engine: Any, measured: Measured, speculation: Speculation | None) -> None:
    """A step of the loop, and what it took the engine."""
    samples, shape, tokens = engine.load.running, None, 0
    if speculation is not None and not speculation.rests_on(samples):
        states = engine.decoding()
        drafts: Mapping[str, Sequence[int]] = speculation.drafts(states, engine.row_capacity)
        engine.put_drafts(drafts)
        shape = speculation.shape(states, drafts)
        tokens = sum(map(len, drafts.values()))
    began = time.process_time()
    steps = engine.step()
    seconds = time.process_time() - began
    if speculation is not None and shape is not None:
        speculation.plan.stepped(shape, seconds)
    measured.steps.append(Step(samples, tokens, seconds))
    _record(measured, steps, speculation)


def _record(measured: Measured, steps: Sequence[Any], speculation: Speculation | None) -> None:
    for step in steps:
        measured.responses[step.sample_id] += step.token_ids
        if speculation is not None:
            speculation.learn(step)
            if step.finish is not None:
                speculation.end(step.sample_id, measured.responses[step.sample_id])


def _decision_microseconds(model: StepTime, repeats: int = 200) -> float:
    """Median time of a decision for 256 samples."""
    random = np.random.default_rng(0)
    samples = [SampleState(f"s{i}", [1] * 100, [1] * 200, 100) for i in range(_TIMED)]

    def made() -> Offers:
        shape = (_TIMED, _WINDOW)
        return Offers(np.ones(shape, np.int32), random.uniform(0.5, 1, shape))

    offers = {"given": made(), "suffix": made()}
    plan = _steered(model, "planner", _WINDOW)
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        plan.choose(samples, offers)
        taken.append(time.perf_counter() - began)
    return median(taken) * 1e6


def _arguments() -> argparse.Namespace:
    def numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
        return lambda text: [kind(each) for each in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("examples/tinymath/model"))
    parser.add_argument("--rounds", type=int, default=7, help="after the first, in which plans know nothing")
    parser.add_argument("--seconds", type=float, default=45.0, help="of the sweep")
    parser.add_argument("--samples", type=numbers(int), default=[8, 16, 32, 64, _MOST], help="batch sizes")
    parser.add_argument("--w4-steps", type=int, default=8, help="of the run that drafts with the 4-bit twin")
    parser.add_argument("--wrong", type=numbers(float), default=list(WRONG), help="shares of wrong tokens")
    arguments = parser.parse_args()
    if arguments.rounds < 2 or max(arguments.samples) > _MOST or min(arguments.samples) < 1:
        parser.error(f"at least two rounds; batches of 1 to {_MOST}")
    return arguments


if __name__ == "__main__":
    main()
