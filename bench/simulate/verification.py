"""Fit what verification costs to published step times: a factor for steps that verify drafts, and the host's time.

Tables from data sheets have neither. Two papers publish how long steps take with and without drafts, on A100 and
B200. What a plain step takes beyond the table is the host's time. The factor is what a step with drafts takes, as a
multiple of the table and that time. It is between 1.26 and 1.44 in all six cases; the seconds in its place would be
between 2.4 and 8.0 ms. So the overhead is a factor. Pure, but for `replays_off`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from statistics import fmean, geometric_mean

from services.simulator.device_tables import B200, Chip, DeviceTable, ModelSizes, decoding_table

A100 = Chip(0.65 * 312e12, 0.8 * 2.04e12, 80e9)
"""NVIDIA's data sheet of the A100 SXM, and the shares of it that an H100 reaches.

EfficientRollout (D.2) fits 0.76 to 0.79 of the bandwidth.
"""
QWEN3_1_7B = ModelSizes(1.72e9, 28, 2048, 16, 8)
QWEN3_4B = ModelSizes(4.02e9, 36, 2560, 32, 8)
QWEN25_7B = ModelSizes(7.07e9, 28, 3584, 28, 4, vocabulary=152_064)
QWEN25_14B = ModelSizes(14.0e9, 48, 5120, 40, 8, vocabulary=152_064)
LLAMA_8B = ModelSizes(7.5e9, 32, 4096, 32, 8, vocabulary=128_256)
BUBBLESPEC, EFFICIENTROLLOUT = "BubbleSpec", "EfficientRollout"
_SAMPLES = 128
"""Samples of an instance in both papers: 1,024 on 8 devices."""
_LIMIT = 8192
"""Tokens of the longest responses of EfficientRollout, and so the steps of a rollout."""


@dataclass(frozen=True, slots=True)
class PublishedStep:
    """Milliseconds of a model's steps without and with drafts, averaged over a rollout.

    `samples` and `drafting` are the mean running samples of an instance in a step, without and with drafts: an
    instance's samples times their mean steps, over its steps. `context` is the mean response in tokens, and
    `drafts` the draft tokens of a sample.
    """

    paper: str
    table: str
    model: str
    sizes: ModelSizes
    chip: Chip
    samples: float
    drafting: float
    context: float
    drafts: float
    plain: float
    verifying: float


def _bubblespec(
    table: str,
    model: str,
    sizes: ModelSizes,
    plain: tuple[float, float, float],
    drafted: tuple[float, float],
    drafts: float,
    verifying: float,
) -> PublishedStep:
    """Return a row: rollout seconds, mean and most tokens without drafts; mean and most steps with drafts."""
    seconds, mean, most = plain
    samples, drafting = _SAMPLES * mean / most, _SAMPLES * drafted[0] / drafted[1]
    milliseconds = 1e3 * seconds / most
    return PublishedStep(
        BUBBLESPEC, table, model, sizes, B200, samples, drafting, mean, drafts, milliseconds, verifying
    )


def _efficientrollout(
    model: str, sizes: ModelSizes, mean: float, plain: float, verifying: float
) -> PublishedStep:
    """Return a row. The paper does not say how many samples run; the mean over a rollout is assumed."""
    samples = _SAMPLES * mean / _LIMIT
    return PublishedStep(
        EFFICIENTROLLOUT, "Table 6", model, sizes, A100, samples, samples, mean, 3.0, plain, verifying
    )


PUBLISHED = (
    # Table 6 has the time of a step of the first model. For the others it is the rollout over its steps (Table 2),
    # which is 1.005 times Table 6 for the first one.
    _bubblespec("Tables 2 and 6", "Qwen3-1.7B", QWEN3_1_7B, (306.2, 6741, 39531), (2913, 15908), 3.84, 10.48),
    _bubblespec(
        "Table 2", "Qwen3-4B", QWEN3_4B, (399.6, 6489, 37910), (2895, 17616), 3.81, 1e3 * 235.0 / 17616
    ),
    _bubblespec(
        "Table 2", "Qwen2.5-VL-7B", QWEN25_7B, (571.9, 9500, 60509), (4853, 34027), 3.73, 1e3 * 400.1 / 34027
    ),
    # Times of target and verification; mean responses are in Table 5, the three draft tokens in E.5.
    _efficientrollout("Qwen2.5-7B", QWEN25_7B, 661.4, 10.45, 14.27),
    _efficientrollout("Llama3.1-8B", LLAMA_8B, 646.2, 13.66, 19.75),
    _efficientrollout("Qwen2.5-14B", QWEN25_14B, 622.9, 20.31, 28.50),
)


@dataclass(frozen=True, slots=True)
class Verification:
    """Factor of steps that verify drafts, and milliseconds of the host between two steps."""

    factor: float
    host: float

    def on(self, table: DeviceTable) -> DeviceTable:
        """Return a table of a data sheet with both."""
        return replace(table, verifying=self.factor, host=self.host)


def of_step(step: PublishedStep) -> Verification:
    """Return the factor and the host's time of one published step."""
    table = decoding_table(step.model, step.sizes, step.chip)

    def milliseconds(samples: float, drafts: float) -> float:
        n = max(1, round(samples))
        return 1e3 * table.seconds(n, round(n * (1 + drafts)), n * step.context)

    host = step.plain - milliseconds(step.samples, 0.0)
    return Verification(step.verifying / (milliseconds(step.drafting, step.drafts) + host), host)


def fitted(steps: Sequence[PublishedStep] = PUBLISHED) -> Verification:
    """Return the geometric mean of the factors of published steps, and the mean of the host's times."""
    each = [of_step(step) for step in steps]
    return Verification(geometric_mean(one.factor for one in each), fmean(one.host for one in each))


def step_errors(steps: Sequence[PublishedStep] = PUBLISHED) -> tuple[float, ...]:
    """Return the relative error of each verifying step if the factor is fitted to the other papers' steps."""
    errors = []
    for step in steps:
        others = fitted([each for each in steps if each.paper != step.paper])
        errors.append(others.factor / of_step(step).factor - 1)
    return tuple(errors)


class DraftKind(StrEnum):
    """Kind of drafts: lookups take no time on the device, passes of draft models do."""

    LOOKUPS = "lookups"
    MODELS = "models"


REPLAYS = Path(__file__).parents[1] / "results" / "simulate.replays.json"


def replays_off(path: Path = REPLAYS) -> Mapping[DraftKind, float]:
    """Return the largest share by which published speeds lie outside the band of their replays, by kind of drafts.

    Raises:
        OSError: the replays' figures are not there: `python -m bench.nightly --publish simulate.replays`.
    """
    figures = json.loads(path.read_text())["figures"]
    return {kind: float(figures[f"{kind}_off"]) for kind in DraftKind}
