"""How good decisions are, apart from what making them takes and from what disturbs a machine: a simulation.

Batches of samples are decoded by the same plans and drafters as in `bench.policy`, but how long a step takes is
known: the fit of the tinymath model on the machine of docs/performance.md, with 5 % noise; and with verification a
multiple of that, of which the plans know nothing but what they measure. Drafts are the responses with a share of
wrong tokens. Asking and planning take no time here. Nothing is learned before a batch.

    python -m bench.deciding [--rounds 4] [--samples 8,32,128] [--model DIR]

Writes runs/bench/deciding.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from bench.policy import WRONG, Compared, Ignored, plans, spoilt
from bench.report import format_value, show_rows, write
from services.generation.drafting.drafter import DraftContext
from services.generation.drafting.given import GivenDrafter
from services.generation.drafting.plan import context_of
from services.generation.drafting.speculation import Plan, Speculation
from services.generation.engine.types import Finish, SampleState, SampleStep
from services.policy.models import architecture_of
from services.policy.step_time import StepTime

_FIT: dict[str, Any] = {
    "throughput": 3.9e11,
    "bandwidth": 1.3e10,
    "kv_scale": 1.0,
    "base": 2.1e-3,
    "per_request": 5.1e-5,
    "per_row": 1.4e-5,
    "per_attended_token": 2.0e-7,
    "verify_per_request": 1.0e-5,
}
# What verification really takes, as a multiple of what the fit says.
_PRICES = (0.6, 1.0, 1.6)
_NOISE = 0.05
_VOCAB, _PROMPT, _RESPONSE, _LEAST_SAMPLES = 64, 24, 160, 32


@dataclass(frozen=True, slots=True)
class _Machine:
    """How long steps really take, in seconds."""

    step_time: StepTime
    price: float
    random: Random

    def seconds(self, samples: int, drafted: int, context: int) -> float:
        plain, verified = self.step_time.seconds(samples, [samples, samples + drafted], context)
        return float(plain + self.price * (verified - plain)) * self.random.lognormvariate(0, _NOISE)


def main() -> None:
    """Simulate, show and write."""
    arguments = _arguments()
    step_time = fitted(arguments.model)
    cells = [
        cell(step_time, price, samples, wrong, arguments.rounds)
        for price in _PRICES
        for samples in arguments.samples
        for wrong in WRONG
    ]
    columns = tuple(cells[0])
    show_rows("deciding: cells", columns, [[format_value(row[each]) for each in columns] for row in cells])
    figures = {
        f"{name}_at_{price}": min(row[column] for row in cells if row["price"] == price)
        for price in _PRICES
        for name, column in (
            ("planner_vs_best_fixed_min", "planner_vs_best_fixed"),
            ("worst_ratio_vs_plain", "toggle_vs_plain"),
        )
    }
    rows = [
        (name, format_value(value), ">= 0.97" if "planner" in name else ">= 0.98")
        for name, value in figures.items()
    ]
    show_rows("deciding, by what verification takes", ("figure", "value", "goal"), rows)
    write("deciding", {**figures, "cells": cells, "rounds": arguments.rounds})


def fitted(model: Path) -> StepTime:
    """The step time that plans go by."""
    return StepTime(architecture=architecture_of(model, "float32"), **_FIT)


def cell(step_time: StepTime, price: float, samples: int, wrong: float, rounds: int) -> dict[str, Any]:
    """All plans on the same batches; rates are means over the rounds."""
    rates: dict[str, list[float]] = {}
    for number in range(rounds):
        random = Random(1000 * samples + number)
        truth = [
            [random.randrange(_VOCAB) for _ in range(random.randrange(_RESPONSE // 4, _RESPONSE))]
            for _ in range(samples * max(1, _LEAST_SAMPLES // samples))
        ]
        given = [spoilt(tokens, wrong, _VOCAB, random) for tokens in truth]
        for name, plan in plans(step_time):
            machine = _Machine(step_time, price, Random(number))
            rates.setdefault(name, []).append(_rate(truth, given, samples, plan, machine))
    compared = Compared({name: fmean(each) for name, each in rates.items()})
    best, worst = compared.best_fixed, compared.worst_toggle
    return {
        "price": price,
        "samples": samples,
        "wrong": wrong,
        "best_fixed": best,
        "best_fixed_vs_plain": compared.ratio(best, "plain"),
        "planner_vs_plain": compared.ratio("planner", "plain"),
        "planner_vs_best_fixed": compared.planner,
        "toggle_worst": worst,
        "toggle_vs_plain": compared.ratio(worst, "plain"),
    }


def _rate(
    truth: Sequence[list[int]],
    given: Sequence[Sequence[int]],
    samples: int,
    plan: Plan | None,
    machine: _Machine,
) -> float:
    """Tokens a second, one batch of so many samples after the other."""
    speculation = None
    if plan is not None:
        speculation = Speculation([GivenDrafter()], plan, _VOCAB, Ignored(), clock=lambda: 0.0)
    seconds = 0.0
    for first in range(0, len(truth), samples):
        batch = {f"{first + i}": each for i, each in enumerate(truth[first : first + samples])}
        if speculation is not None:
            for name in batch:
                speculation.begin(DraftContext(name, [0] * _PROMPT, given[int(name)]))
        responses = {name: tokens[:1] for name, tokens in batch.items()}
        while responses:
            seconds += _step(batch, responses, speculation, machine)
    return sum(map(len, truth)) / seconds


def _step(
    batch: dict[str, list[int]],
    responses: dict[str, list[int]],
    speculation: Speculation | None,
    machine: _Machine,
) -> float:
    """One step of what is left of a batch: `responses` grow, and go when they are whole. The seconds it took."""
    states = [
        SampleState(name, [0] * _PROMPT, response, len(batch[name]) - len(response) - 1)
        for name, response in responses.items()
    ]
    context, samples = context_of(states), len(states)
    drafts = {} if speculation is None else speculation.drafts(states)
    seconds = machine.seconds(samples, sum(map(len, drafts.values())), context)
    if speculation is not None and (shape := speculation.shape(states, drafts)) is not None:
        speculation.plan.stepped(shape, seconds)
    for name, response in list(responses.items()):
        draft, rest = drafts.get(name, []), batch[name][len(response) :]
        accepted = next(
            (i for i, pair in enumerate(zip(draft, rest, strict=False)) if pair[0] != pair[1]), len(draft)
        )
        response += rest[: accepted + 1]
        whole = len(response) == len(batch[name])
        if whole:
            del responses[name]
        if speculation is not None:
            step = SampleStep(name, rest[: accepted + 1], [], Finish.LENGTH if whole else None)
            step.drafted, step.accepted = len(draft), accepted
            speculation.learn(step)
            if whole:
                speculation.end(name, response)
    return seconds


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("examples/tinymath/model"))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--samples",
        type=lambda text: [int(each) for each in text.split(",")],
        default=[8, 32, 128],
        help="batches",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
