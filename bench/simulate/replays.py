"""Replay published rollouts at both ends of the band of modelled times, and compare them with the published speeds.

One table has the published step times and the fitted ones. The other has how many times as fast as plain decoding
each published rollout with drafts is: published, by tables from data sheets (optimistic), and with the fitted
factor and the host's time of the paper's engine (pessimistic). Takes about a minute. Writes
runs/bench/simulate.replays.json.

    make bench NAME=simulate.replays
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp
from statistics import fmean
from typing import Any

import numpy as np

from bench.report import format_value, option_parser, say, show_rows, write
from bench.simulate.verification import (
    A100,
    BUBBLESPEC,
    EFFICIENTROLLOUT,
    LLAMA_8B,
    PUBLISHED,
    QWEN3_1_7B,
    QWEN3_4B,
    QWEN25_7B,
    QWEN25_14B,
    DraftKind,
    Verification,
    fitted,
    of_step,
    step_errors,
)
from services.contracts.knobs import Knobs
from services.contracts.modes import ModeName
from services.simulator.cluster_simulation import ClusterSimulation
from services.simulator.device_tables import B200, Chip, DeviceTable, ModelSizes, decoding_table
from services.simulator.simulation_setup import (
    LogNormalLengths,
    SimulatedSource,
    SimulatedWorkload,
    SimulationSetup,
)

_INSTANCES, _RUNNING, _PROMPT = 8, 128, 256
STEPS = 6
"""Simulated steps of a rollout; figures are means over them."""
_SUFFIX_DRAFTS = 4
_W4 = 0.36
"""Share of a step's memory traffic that a pass of the W4 copy has (EfficientRollout, Table 4)."""
_SPREAD, _ENDLESS, _LIMIT = 0.45, 0.003, 8192


@dataclass(frozen=True, slots=True)
class PublishedRollout:
    """Seconds of a method's rollout, and how it drafts: length, mode, and acceptance of each token."""

    method: str
    seconds: float
    mode: ModeName
    length: int
    acceptance: float
    passes: DeviceTable | None = None
    """Step times of the draft model; None for lookups."""

    @property
    def kind(self) -> DraftKind:
        """Return the kind of drafts."""
        return DraftKind.LOOKUPS if self.passes is None else DraftKind.MODELS


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model of a paper: workload, seconds of plain decoding's rollout, and rollouts with drafts."""

    paper: str
    name: str
    sizes: ModelSizes
    chip: Chip
    work: SimulatedWorkload
    slack: float
    """Samples beyond its fair share that an instance takes to keep a prompt's samples together."""
    plain: float
    rollouts: tuple[PublishedRollout, ...]


@dataclass(frozen=True, slots=True)
class ReplayedRollout:
    """A method on a model, times as fast as plain decoding: published, and at both ends of the band."""

    paper: str
    model: str
    method: str
    kind: DraftKind
    published: float
    pessimistic: float
    optimistic: float

    @property
    def outside(self) -> float:
        """Return by which share the published speed lies below (negative) or above the band; 0 within.

        The pessimistic end is the higher one where passes of a draft model save more of the host's time than
        verification costs.
        """
        low, high = sorted((self.pessimistic, self.optimistic))
        return min(0.0, self.published / low - 1) + max(0.0, self.published / high - 1)


def acceptance_for(rate: float, length: int) -> float:
    """Return the acceptance of each token with which this share of the tokens of such drafts is accepted."""
    return _solved(rate, lambda p: sum(p**k for k in range(1, length + 1)) / length, 0.0, 1.0, 40)


def lengths_with(mean: float, longest: float, limit: int, prompts: int, samples: int) -> LogNormalLengths:
    """Return log-normal lengths with this mean, and with this longest response of a step on average."""

    def drawn(spread: float, middle: float) -> tuple[float, float]:
        random, lengths = np.random.default_rng(1), LogNormalLengths(middle, spread, limit)
        steps = [lengths.draw(prompts, samples, random) for _ in range(12)]
        return fmean(float(each.mean()) for each in steps), fmean(float(each.max()) for each in steps)

    def middle(spread: float) -> float:
        found = mean / exp(spread**2 / 2)
        # Twice, because the limit takes from the mean.
        for _ in range(2):
            found *= mean / drawn(spread, found)[0]
        return found

    spread = _solved(longest, lambda each: drawn(each, middle(each))[1], 0.05, 1.5, 8)
    return LogNormalLengths(middle(spread), spread, limit)


def _solved(wanted: float, of: Callable[[float], float], low: float, high: float, rounds: int) -> float:
    """Return the place where a rising function has the wanted value, by bisection."""
    for _ in range(rounds):
        place = (low + high) / 2
        low, high = (place, high) if of(place) < wanted else (low, place)
    return (low + high) / 2


@cache
def published_models() -> tuple[PublishedModel, ...]:
    """Return the models of both papers with their published figures.

    BubbleSpec, Table 2: 8 B200, 64 prompts of 16 samples, suffix drafts of 4 tokens with the published acceptance
    rate, mean and longest responses. Half of the variance of lengths is assumed to be between prompts, a prompt's
    samples stay together, and a suffix matches everywhere.

    EfficientRollout, Table 2: 8 A100, 128 prompts of 8 samples of at most 8,192 tokens, mean lengths (Table 5),
    draft lengths and acceptance, the time of an EAGLE-3 pass (Table 6), the memory traffic of a W4 pass (Table 4).
    3 in 1,000 samples are assumed to reach the limit. The history-based row is left out, because it is lossy.
    """
    return (
        _bubblespec("Qwen3-1.7B", QWEN3_1_7B, 49152, (6741, 39361), 306.2, 167.6, 0.2994),
        _bubblespec("Qwen3-4B", QWEN3_4B, 49152, (6481, 37910), 399.6, 235.0, 0.286),
        _bubblespec("Qwen2.5-VL-7B", QWEN25_7B, 65536, (9500, 60509), 571.9, 400.1, 0.217),
        _efficientrollout(
            "Qwen2.5-7B", QWEN25_7B, 661.4, 0.82, 82.4, (81.9, 3, 0.573), (75.6, 7, 0.982), (66.3, 8, 0.982)
        ),
        _efficientrollout(
            "Qwen2.5-14B",
            QWEN25_14B,
            622.9,
            0.91,
            126.6,
            (115.4, 3, 0.603),
            (135.0, 5, 0.973),
            (105.3, 7, 0.976),
        ),
        _efficientrollout(
            "Llama3.1-8B",
            LLAMA_8B,
            646.2,
            0.85,
            126.4,
            (172.8, 3, 0.543),
            (118.9, 5, 0.963),
            (112.9, 5, 0.958),
        ),
    )


def _bubblespec(
    name: str,
    sizes: ModelSizes,
    limit: int,
    lengths: tuple[float, float],
    plain: float,
    drafted: float,
    rate: float,
) -> PublishedModel:
    work = SimulatedWorkload(lengths_with(*lengths, limit, 64, 16), 64, 16, _PROMPT)
    acceptance = acceptance_for(rate, _SUFFIX_DRAFTS)
    own = PublishedRollout("BubbleSpec", drafted, "fixed", _SUFFIX_DRAFTS, acceptance)
    return PublishedModel(BUBBLESPEC, name, sizes, B200, work, 16.0, plain, (own,))


def _efficientrollout(
    name: str, sizes: ModelSizes, mean: float, eagle: float, plain: float, *methods: tuple[float, int, float]
) -> PublishedModel:
    bulk = (mean - _ENDLESS * _LIMIT) / (1 - _ENDLESS)
    lengths = LogNormalLengths(bulk / exp(_SPREAD**2 / 2), _SPREAD, _LIMIT, endless=_ENDLESS)
    head = DeviceTable("EAGLE-3", 1, np.array([1.0, 1024.0]), np.full(2, eagle))
    copy = decoding_table("W4", sizes, A100, weight_bytes=2 * _W4)
    names: tuple[tuple[str, ModeName, DeviceTable], ...] = (
        ("Learned auxiliary", "fixed", head),
        ("Quantized self-SD", "fixed", copy),
        ("EfficientRollout", "toggle", copy),
    )
    rollouts = [
        PublishedRollout(method, seconds, mode, length, acceptance, passes)
        for (method, mode, passes), (seconds, length, acceptance) in zip(names, methods, strict=True)
    ]
    work = SimulatedWorkload(lengths, 128, 8, _PROMPT)
    return PublishedModel(EFFICIENTROLLOUT, name, sizes, A100, work, 1.0, plain, tuple(rollouts))


def verification_of(paper: str) -> Verification:
    """Return the fitted factor, and the host's time of a paper's own engine."""
    return Verification(fitted().factor, fitted([each for each in PUBLISHED if each.paper == paper]).host)


def replayed(model: PublishedModel, steps: int = STEPS) -> Iterator[ReplayedRollout]:
    """Yield the rollouts of a model, simulated at both ends of the band.

    The papers' engines are taken to wait for the host in plain steps, too.
    """
    sheet = decoding_table(model.name, model.sizes, model.chip)
    ends = (sheet, verification_of(model.paper).on(sheet))
    plain = [_seconds(model, device, None, steps) for device in ends]
    for rollout in model.rollouts:
        drafted = [_seconds(model, device, rollout, steps) for device in ends]
        optimistic, pessimistic = (without / own for without, own in zip(plain, drafted, strict=True))
        yield ReplayedRollout(
            model.paper,
            model.name,
            rollout.method,
            rollout.kind,
            model.plain / rollout.seconds,
            pessimistic,
            optimistic,
        )


def _seconds(
    model: PublishedModel, device: DeviceTable, rollout: PublishedRollout | None, steps: int
) -> float:
    """Return the mean seconds of a step's rollout."""
    setup = SimulationSetup(
        device,
        _INSTANCES,
        model.work,
        steps,
        max_running=_RUNNING,
        foreseen=False,
        affinity_slack=model.slack,
    )
    if rollout is not None:
        knobs = Knobs(mode=rollout.mode, draft_cap=rollout.length, latch=rollout.mode == "toggle")
        source = SimulatedSource("drafts", rollout.acceptance, rollout.passes)
        setup = replace(setup, knobs=knobs, sources=(source,))
    return fmean(step.seconds for step in ClusterSimulation(setup).run())


def off_by_kind(rows: Sequence[ReplayedRollout]) -> dict[str, float]:
    """Return the largest share by which published speeds lie outside the band, by kind of drafts."""
    return {
        f"{kind}_off": max((abs(row.outside) for row in rows if row.kind == kind), default=0.0)
        for kind in DraftKind
    }


def tables_of(rows: Sequence[ReplayedRollout]) -> dict[str, Any]:
    """Return the tables of published steps and of replayed rollouts."""
    factor, steps = fitted().factor, []
    for step, error in zip(PUBLISHED, step_errors(), strict=True):
        own = of_step(step)
        steps.append(
            (
                f"{step.paper}, {step.table}",
                step.model,
                *map(format_value, (step.plain, step.verifying, own.host, own.factor)),
                format_value(step.verifying * factor / own.factor),
                f"{error:+.0%}",
            )
        )
    heads = ("source", "model", "plain ms", "with drafts ms", "host ms", "factor", "fitted ms", "left out")
    rollouts = [
        (
            row.paper,
            row.model,
            row.method,
            *(f"{each:.2f}" for each in (row.published, row.pessimistic, row.optimistic)),
            f"{row.outside:+.0%}" if row.outside else "within",
        )
        for row in rows
    ]
    columns = ("paper", "model", "method", "published", "pessimistic", "optimistic", "outside")
    return {"steps": {"columns": heads, "rows": steps}, "rollouts": {"columns": columns, "rows": rollouts}}


def main() -> None:
    """Replay, then show and write the tables."""
    given = _arguments()
    rows = list[ReplayedRollout]()
    for model in published_models():
        rows += replayed(model, given.steps)
        say(f"simulate.replays: {model.paper}, {model.name}")
    tables = tables_of(rows)
    titles = ("steps, published and fitted", "rollouts, times as fast as plain decoding")
    for title, table in zip(titles, tables.values(), strict=True):
        show_rows(title, table["columns"], table["rows"])
    found = fitted()
    figures = {
        "verification_factor": found.factor,
        "host_ms": found.host,
        "step_error": max(map(abs, step_errors())),
        **off_by_kind(rows),
    }
    write("simulate.replays", {**figures, "options": vars(given), "tables": tables})


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="simulated steps of each rollout")
    return parser.parse_args()


if __name__ == "__main__":
    main()
