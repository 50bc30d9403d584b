"""Plan the sweep with which an engine measures its own step times when it starts. Pure.

Two seconds are enough to learn how steps grow with rows and samples: small and large batches, plainly and with
drafts, at the numbers of rows between which times may jump. Contexts are short, because prefilling long ones would
take longer than all else; one sample with a longer prompt says what verification costs by context. The most telling
steps come first, so that a slow engine, which ends the sweep early, has measured those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SWEEP_SECONDS = 2.0
"""Time of a sweep, without prefill."""
SHORT_CONTEXT = 64
"""Longest mean context of a sample, in tokens, that counts as short."""
PROMPT, LONG_PROMPT = 8, 1024
"""Prompt tokens of most steps and of those of the long context."""
# Draft tokens a sample for a lone sample, and rows a sample for larger batches.
_ALONE = (0, 1, 2, 3, 5, 8, 12, 16)
_TOGETHER = (2, 4, 8, 16)
_SMALL = 8


@dataclass(frozen=True, slots=True)
class SweptBatch:
    """Batch to measure: samples with prompts of this length, and the draft tokens of a sample in each step."""

    samples: int
    prompt: int
    drafts: Sequence[int]


def swept_batches(max_samples: int, max_rows: int, max_length: int) -> list[SweptBatch]:
    """Return the batches to measure, the most telling first, within the limits of an engine.

    Args:
        max_samples: largest batch.
        max_rows: most verified tokens of a step.
        max_length: longest sample, in tokens.
    """
    largest = min(max_samples, max_rows)
    powers = [1 << k for k in range(largest.bit_length()) if 1 << k < largest]
    middle = [each for each in powers if each >= _SMALL]
    verified = {1: _ALONE, largest: _drafts(largest)} | {n: _drafts(n) for n in middle[:1] + middle[2:3]}
    long = SweptBatch(1, min(LONG_PROMPT, max_length // 2), (0, 8))
    order = [1, largest, *sorted({*powers, *verified} - {1, largest}, key=lambda n: (n not in verified, n))]
    batches = [SweptBatch(n, PROMPT, verified.get(n, (0,))) for n in order]
    batches.insert(2, long)
    return [
        SweptBatch(each.samples, each.prompt, fitting)
        for each in batches
        if (fitting := [k for k in each.drafts if each.samples * (1 + k) <= max_rows])
    ]


def _drafts(samples: int) -> tuple[int, ...]:
    return (0, *(each - 1 for each in _TOGETHER))
