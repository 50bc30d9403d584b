"""BubbleSpec, Tables 2, 3 and 8: 8 B200, 64 prompts of 16 samples, suffix drafts of 4 tokens, inter-GPU bubbles.

Of the tables, response lengths and acceptance rates are inputs: they belong to models and data. One number is
fitted, the host's time between two steps, by the rollout time of Verl with Qwen3-1.7B. Prompts are split among the
instances once, in equal numbers, as Verl does. The paper leaves open how alike the lengths of a prompt's samples
are; half of the variance is assumed to be between prompts. Drafts of every prompt are taken to be there at every
position, because a suffix matches anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

from bench.simulate.replay import ReplayedCell, acceptance_for, lengths_with, solved
from services.bubbles.config import BubblesConfig
from services.contracts.knobs import Knobs
from services.simulator.cluster_simulation import ClusterSimulation
from services.simulator.device_tables import (
    B200,
    QWEN3_1_7B,
    QWEN3_4B,
    QWEN25_7B,
    ModelSizes,
    decoding_table,
    with_host,
)
from services.simulator.modelled_instance import SimulatedStep
from services.simulator.simulation_setup import (
    LogNormalLengths,
    SimulatedSource,
    SimulatedWorkload,
    SimulationSetup,
)

DRAFT_LENGTH = 4
_STEPS, _PROMPTS, _SAMPLES = 8, 64, 16


@dataclass(frozen=True, slots=True)
class BubbleSpecModel:
    """Row of Tables 2 and 3: rollout time of Verl, then figures of BubbleSpec. Times in seconds."""

    name: str
    sizes: ModelSizes
    limit: int
    mean: float
    longest: float
    verl: float
    bubblespec: tuple[float, float, float]
    """Rollout time, decoding steps on average and at most."""
    accepted: tuple[float, float, float]
    """Acceptance length, draft length, acceptance rate."""
    bubbles: tuple[float, float]
    drafts: tuple[float, float]


MODELS = (
    BubbleSpecModel(
        "Qwen3-1.7B", QWEN3_1_7B, 49152, 6741, 39361, 306.2, (167.6, 2913, 15908),
        (2.15, 3.84, 0.2994), (61.9, 109.1), (4169, 24029),
    ),
    BubbleSpecModel(
        "Qwen3-4B", QWEN3_4B, 49152, 6481, 37910, 399.6, (235.0, 2895, 17616),
        (2.09, 3.81, 0.286), (91.1, 164.7), (4434, 25188),
    ),
    BubbleSpecModel(
        "Qwen2.5-VL-7B", QWEN25_7B, 65536, 9500, 60509, 571.9, (400.1, 4853, 34027),
        (1.81, 3.73, 0.217), (157.7, 283.2), (6802, 46824),
    ),
)  # fmt: skip
TABLE_8 = {4: (183.8, 17455, 6889, 27880), 16: (167.6, 15908, 4169, 24029), 32: (184.4, 18028, 2960, 18028)}
"""Rollout time, most decoding steps, draft response length on average and at most, by samples for a prompt."""


@dataclass(frozen=True, slots=True)
class RolloutFigures:
    """Means over the steps of a run: rollout time (s), decoding steps, acceptance, bubbles (s), drafts (tokens)."""

    seconds: float
    steps: float
    most_steps: float
    accepted: float
    drafted: float
    bubble: float
    longest_bubble: float
    draft: float
    longest_draft: float

    @classmethod
    def of(cls, steps: Sequence[SimulatedStep], drafts: Sequence[Sequence[int]]) -> RolloutFigures:
        """Return the means over these steps, and over what was pre-generated of each."""
        columns = zip(
            *(
                (
                    each.seconds,
                    each.decode_steps,
                    each.most_decode_steps,
                    each.acceptance_length,
                    each.draft_length,
                    each.bubble_seconds,
                    each.longest_bubble,
                    fmean(made or [0]),
                    max(made, default=0),
                )
                for each, made in zip(steps, drafts, strict=True)
            ),
            strict=True,
        )
        return cls(*map(fmean, columns))


def rollout(
    model: BubbleSpecModel, host: float, drafting: bool, per_prompt: int = _SAMPLES, steps: int = _STEPS
) -> RolloutFigures:
    """Simulate the steps of a run, with or without drafts; the first step has none, and does not count."""
    work = SimulatedWorkload(_lengths(model), _PROMPTS, _SAMPLES, 256)
    setup = SimulationSetup(
        with_host(decoding_table(model.name, model.sizes, B200), host),
        8,
        work,
        steps + 1,
        Knobs(mode="fixed", draft_cap=DRAFT_LENGTH),
        max_running=128,
        foreseen=False,
        affinity_slack=float(_SAMPLES),
    )
    if drafting:
        setup = replace(
            setup,
            sources=(SimulatedSource("suffix", acceptance_for(model.accepted[2], DRAFT_LENGTH)),),
            bubbles=BubblesConfig.model_construct(during_update="halt", coupled=False, per_prompt=per_prompt),
        )
    simulation, done, drafts = ClusterSimulation(setup), list[SimulatedStep](), list[list[int]]()
    for step in simulation.run():
        done.append(step)
        drafts.append(list(simulation.covered.values()))
    return RolloutFigures.of(done[1:], drafts[1:])


@cache
def _lengths(model: BubbleSpecModel) -> LogNormalLengths:
    return lengths_with(model.mean, model.longest, model.limit, _PROMPTS * _SAMPLES)


def replay() -> list[ReplayedCell]:
    """Return the cells of the three tables."""
    first = MODELS[0]
    host = solved(first.verl, lambda seconds: rollout(first, seconds, False).seconds, 0.0, 0.012, 8)
    cells = []
    for model in MODELS:
        plain, drafted = rollout(model, host, False), rollout(model, host, True)
        cells += _table_2(model, plain, drafted) + _table_3(model, drafted)
    for per_prompt, published in TABLE_8.items():
        found = rollout(first, host, True, per_prompt)
        figures = (found.seconds, found.most_steps, found.draft, found.longest_draft)
        names = ("rollout s", "most steps", "draft length", "longest draft")
        cells += [
            ReplayedCell("BubbleSpec, Table 8", f"{per_prompt} a prompt", *each)
            for each in zip(names, published, figures, strict=True)
        ]
    return cells


def _table_2(model: BubbleSpecModel, plain: RolloutFigures, drafted: RolloutFigures) -> list[ReplayedCell]:
    names = ("rollout s", "steps", "most steps", "acceptance length", "draft length")
    own = (drafted.seconds, drafted.steps, drafted.most_steps, drafted.accepted, drafted.drafted)
    published = (*model.bubblespec, *model.accepted[:2])
    table, first = "BubbleSpec, Table 2", model is MODELS[0]
    # Without drafts, steps are as many as tokens: an input.
    verl = ReplayedCell(table, f"{model.name}, Verl", names[0], model.verl, plain.seconds, fitted=first)
    return [
        verl,
        *(
            ReplayedCell(table, f"{model.name}, BubbleSpec", *each)
            for each in zip(names, published, own, strict=True)
        ),
    ]


def _table_3(model: BubbleSpecModel, drafted: RolloutFigures) -> list[ReplayedCell]:
    found = (drafted.bubble, drafted.longest_bubble, drafted.draft, drafted.longest_draft)
    names = ("bubble s", "longest bubble s", "draft length", "longest draft")
    return [
        ReplayedCell("BubbleSpec, Table 3", model.name, *each)
        for each in zip(names, (*model.bubbles, *model.drafts), found, strict=True)
    ]
