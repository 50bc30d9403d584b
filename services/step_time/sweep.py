"""Plan the sweep with which an engine measures its own step times when it starts. Pure.

Two seconds are enough to learn how steps grow with rows and samples: small and large batches, plainly and with
drafts, at the numbers of rows between which times may jump. Contexts are short, because prefilling long ones
would take longer than all else. One sample with a longer prompt says what verification costs by context: the
longer it is, the less the noise of its steps counts where contexts are longer still. The most telling steps come
first, so that a slow engine, which ends the sweep early, has measured those.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

SWEEP_SECONDS = 2.0
"""Time of the measured steps of a sweep."""
SHORT_CONTEXT = 64
"""Longest mean context of a sample, in tokens, that counts as short."""
PROMPT, LONG_PROMPT = 8, 4096
"""Prompt tokens of most steps and of those of the long context."""
# Rows a sample: of a lone one, of one with a long context, of larger batches.
_ALONE, _LONG, _TOGETHER = (2, 3, 4, 6, 9, 13, 17), (9,), (2, 4, 8, 16)
_SMALL = 8


@dataclass(frozen=True, slots=True)
class SweptBatch:
    """Batch to measure: samples with prompts of this length, and the verified tokens of each step, rising."""

    samples: int
    prompt: int
    rows: Sequence[int]


def swept_batches(
    max_samples: int, max_rows: int, max_length: int, graphs: Sequence[int] = ()
) -> list[SweptBatch]:
    """Return the batches to measure, the most telling first, within the limits of an engine.

    Args:
        max_samples: largest batch.
        max_rows: most verified tokens of a step.
        max_length: longest sample, in tokens.
        graphs: numbers of verified tokens for which the engine has graphs, rising. Steps between two of them are
            measured at the larger; the largest is measured, and the step beyond it, in which times jump.
    """
    largest = min(max_samples, max_rows)
    powers = [1 << k for k in range(largest.bit_length()) if 1 << k < largest]
    middle = [each for each in powers if each >= _SMALL]
    verified = {largest, *middle[:1], *middle[2:3]}
    order = [1, largest, *sorted({*powers, *verified} - {1, largest}, key=lambda n: (n not in verified, n))]
    widths = {1: _ALONE} | dict.fromkeys(verified - {1}, _TOGETHER)
    batches = [SweptBatch(n, PROMPT, _rows(n, widths.get(n, ()), max_rows, graphs)) for n in order]
    long = SweptBatch(1, min(LONG_PROMPT, max_length // 2), _rows(1, _LONG, max_rows, graphs))
    return [*batches[:2], long, *batches[2:]]


def _rows(samples: int, each: Sequence[int], most: int, graphs: Sequence[int]) -> list[int]:
    """Return the rows of steps, of `samples` alone and with so many rows of each sample."""
    wanted = {samples * k for k in each}
    if graphs:
        wanted = {graphs[bisect_left(graphs, rows)] if rows <= graphs[-1] else rows for rows in wanted}
        if wanted and samples <= graphs[-1] <= max(wanted):
            wanted |= {graphs[-1], graphs[-1] + 1}
    return sorted(rows for rows in {samples, *wanted} if samples <= rows <= most)
