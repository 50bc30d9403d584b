"""Define what a run measures: numbers of samples, contexts and drafts, the engines, and the text of a replay. Pure.

Two properties of a text decide how many tokens drafters save, and both are given here. Parts that occur earlier in
the text are what n-gram and suffix drafters find. Where an earlier rollout of the same seed leaves the response,
and for how long, decides what a reference is worth. All other tokens are random: the time of a step does not depend
on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

_FIRST_TOKEN = 3
"""Lowest token of a text; lower ones are padding, begin and end in most vocabularies."""


@dataclass(frozen=True, slots=True)
class TextRepeats:
    """Parts of a text that are copied from earlier in it: their share of all tokens, and their mean length."""

    share: float = 0.3
    length: float = 24.0


@dataclass(frozen=True, slots=True)
class TextDrift:
    """Difference of a reference: it leaves the text after `every` tokens, for `away` tokens; both are means."""

    every: float = 33.0
    away: float = 4.0

    def __str__(self) -> str:
        return f"references that differ every {self.every:g} tokens"


def text_of(length: int, vocabulary: int, repeats: TextRepeats, seed: int) -> list[int]:
    """Return `length` tokens of a vocabulary. A longer text of the same seed begins with a shorter one."""
    random = Random(seed)
    begins = repeats.share / (repeats.length * (1 - repeats.share)) if repeats.share < 1 else 1.0
    text = [random.randrange(_FIRST_TOKEN, vocabulary)]
    while len(text) < length:
        if random.random() >= begins:
            text.append(random.randrange(_FIRST_TOKEN, vocabulary))
            continue
        place = random.randrange(len(text))
        for offset in range(_some(random, repeats.length)):
            text.append(text[place + offset])
    return text[:length]


def reference_of(text: Sequence[int], vocabulary: int, drift: TextDrift, seed: int) -> list[int]:
    """Return a text of the same length that differs in some runs of tokens, and is in step with it in between."""
    random, reference, known = Random(seed), list(text), vocabulary - _FIRST_TOKEN
    place = _some(random, drift.every)
    while place < len(reference):
        end = place + _some(random, drift.away)
        for i in range(place, min(end, len(reference))):
            reference[i] = _FIRST_TOKEN + (text[i] - _FIRST_TOKEN + random.randrange(1, known)) % known
        place = end + _some(random, drift.every)
    return reference


def _some(random: Random, mean: float) -> int:
    """Draw a number of tokens, at least 1, from the geometric distribution with this mean."""
    if mean <= 1:
        return 1
    return 1 + int(math.log(1 - random.random()) / math.log(1 - 1 / mean))


class EngineKind(StrEnum):
    """Engines that are compared. STOCK is vLLM with its own defaults, other STOCK ones add its own speculation.

    TREES is V1 with draft trees, with our attention kernel. INVARIANT is V1 in vLLM's batch-invariant mode. EAGLE3
    and QUANTIZED are V1 with a draft model: a head of random weights, and the quantized copy. Almost no drafts of a
    head of random weights are accepted, so these engines only show what drafting costs.
    """

    STOCK = "stock vLLM"
    STOCK_EAGLE3 = "stock vLLM with EAGLE-3"
    STOCK_NGRAM = "stock vLLM with n-gram"
    STOCK_SUFFIX = "stock vLLM with suffix"
    V1 = "V1"
    V2 = "V2"
    AHEAD = "V2 ahead"
    INVARIANT = "V1 batch-invariant"
    EAGLE3 = "V1 with EAGLE-3"
    QUANTIZED = "V1 with a 4-bit copy"
    TREES = "V1 with trees"


class Graphs(StrEnum):
    """CUDA graphs of an engine: of whole steps without compilation, vLLM's default with it, or none."""

    FULL = "full"
    DEFAULT = "default"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class GpuDraft:
    """Draft tokens for each sample and step, and the share of wrong ones."""

    length: int
    wrong: float


@dataclass(frozen=True, slots=True)
class GpuCell:
    """Samples that decode at once, and the tokens of their prompts."""

    rows: int
    context: int


@dataclass(frozen=True, slots=True)
class ReplaySizes:
    """Batches that generate a given text (engines/replay.py): samples, their shortest prompt, tokens of each.

    Prompts have `prompt` to twice as many tokens. Paceline also drafts from references, with each of `drifts`; a
    batch of more tokens than the shortest has the first alone. Drafts are decided in `mode` by step times that are
    swept for `sweep_seconds`, as an instance does.
    """

    samples: int = 64
    prompt: int = 256
    tokens: tuple[int, ...] = (512, 4096)
    repeats: TextRepeats = field(default_factory=TextRepeats)
    drifts: tuple[TextDrift, ...] = (TextDrift(33.0, 4.0), TextDrift(10.0, 4.0))
    mode: str = "planner"
    sweep_seconds: float = 2.0


@dataclass(frozen=True, slots=True)
class GpuSizes:
    """Settings of a run. Every cell of rows x contexts is measured plainly and with each draft.

    `brief_cells` come first, with `brief_drafts` alone. Each setting has `steps` timed steps. The runs that compare
    tokens have `exact` samples of `tokens` tokens. `draft_window` is the maximum draft tokens of a sample for which
    graphs are captured, as in instances.
    """

    rows: tuple[int, ...] = (1, 8, 16, 32, 64, 128, 256)
    contexts: tuple[int, ...] = (1024, 4096, 16_384)
    lengths: tuple[int, ...] = (4, 8, 15)
    wrong: tuple[float, ...] = (0.0, 0.1, 0.2)
    brief_cells: tuple[GpuCell, ...] = (
        GpuCell(64, 1024),
        GpuCell(8, 1024),
        GpuCell(1, 1024),
        GpuCell(128, 1024),
    )
    brief_drafts: tuple[GpuDraft, ...] = (
        GpuDraft(4, 0.0),
        GpuDraft(4, 0.2),
        GpuDraft(8, 0.1),
        GpuDraft(15, 0.1),
    )
    steps: int = 24
    exact: int = 16
    tokens: int = 96
    draft_window: int = 16
    kv_bytes: int | None = None
    kinds: tuple[EngineKind, ...] = field(default=tuple(EngineKind))
    replay: ReplaySizes = field(default_factory=ReplaySizes)

    @property
    def drafts(self) -> tuple[GpuDraft, ...]:
        """All drafts."""
        return tuple(GpuDraft(length, wrong) for length in self.lengths for wrong in self.wrong)

    @property
    def cells(self) -> tuple[GpuCell, ...]:
        """All cells, in ascending order of their KV."""
        return tuple(GpuCell(rows, context) for context in self.contexts for rows in self.rows)

    @property
    def longest(self) -> int:
        """Maximum tokens of a sequence."""
        drafted = (self.steps + 16) * (max(self.lengths) + 1)
        replayed = 2 * self.replay.prompt + max(self.replay.tokens)
        return max(max(self.contexts) + drafted + 64, self.tokens + 256, replayed + 64)


TINY = GpuSizes(
    rows=(1, 2), contexts=(12,), lengths=(2,), wrong=(0.2,), brief_cells=(GpuCell(2, 12),),
    brief_drafts=(GpuDraft(2, 0.2),), steps=2, exact=3, tokens=8, draft_window=0, kv_bytes=8 << 20,
    kinds=(
        EngineKind.STOCK, EngineKind.STOCK_EAGLE3, EngineKind.STOCK_NGRAM, EngineKind.STOCK_SUFFIX, EngineKind.V1,
        EngineKind.AHEAD, EngineKind.EAGLE3, EngineKind.QUANTIZED, EngineKind.TREES,
    ),
    replay=ReplaySizes(
        samples=2, prompt=12, tokens=(24,), repeats=TextRepeats(0.6, 12.0), drifts=(TextDrift(8.0, 2.0),),
        mode="fixed", sweep_seconds=0,
    ),
)  # fmt: skip
"""Sizes for a CPU, where the other kinds are equal to these or not available."""
