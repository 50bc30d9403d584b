"""Bound the size of an engine's steps: rows by memory, CUDA graphs, and room for prompts. Pure.

vLLM measures a forward pass, and its own sampler with one row of logits for each sample, before it sizes the KV
cache. A step that verifies drafts has many times as many rows, so the memory of sampling is counted here.

vLLM's list of CUDA graphs is made for plain decoding: it ends at twice the number of samples or at a limit of the
device (512 on an H100), whichever is less. A step that verifies k drafts of each of n samples has n (k + 1) tokens,
and beyond the list it is launched kernel by kernel. The planner uses the sizes that the workers captured
(`Engine.graph_sizes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

_FLOAT = 4
LOGITS_BYTES = 1 << 30
"""Most memory for the logits of a step in float32, which bounds the verified tokens of one."""
PART_BYTES = 64 << 20
"""Memory of the rows that are processed at a time where that needs copies."""
# Copies of a part that are alive at once: its logits, counts, and four results of penalties.
_PARTS = 6
# Scratch of the sampler's kernels for each row: the result of each piece of it, and the search for thresholds.
PIECES, KEYS, STATE = 64, 1 << 14, 40
_PIECE_BYTES, _STATES = 6 * 4 + 4 + 8 + 4, 2
# Counts are moved to a table twice as large while both are there.
_GROWTH = 1.5


class StepMemory(NamedTuple):
    """Most memory of a step, in bytes, by what it is for. No noise or probabilities are ever in memory."""

    logits: int
    """Logits of all rows, in the model's precision."""
    gathered: int
    """The same logits as they are gathered from the ranks; freed before sampling begins."""
    edited: int
    """Logits in float32 of rows with penalties or masks by token; at worst, of all rows."""
    parts: int
    """Copies of the rows that are processed at a time."""
    scratch: int
    """Scratch memory of the sampler's kernels."""
    counts: int
    """Token counts of the samples with penalties."""

    @property
    def total(self) -> int:
        """Peak of the bytes allocated at the same time."""
        return self.counts + self.logits + max(self.gathered, self.edited + self.parts + self.scratch)

    def beyond(self, measured: int) -> int:
        """Return the bytes to reserve beyond `measured`, the transient memory that vLLM already leaves room for."""
        return max(0, self.total - max(0, measured))


def row_capacity(scheduled_tokens: int, vocab_size: int) -> int:
    """Return the most verified tokens of a step that has at most `scheduled_tokens` tokens of all kinds."""
    return min(scheduled_tokens, LOGITS_BYTES // (_FLOAT * vocab_size))


def step_memory(
    rows: int, samples: int, vocab_size: int, *, logit_bytes: int = 2, ranks: int = 1, counted: bool = True
) -> StepMemory:
    """Return the memory of the largest step.

    Args:
        rows: most verified tokens of a step; every sample has at least one.
        samples: samples that run at once.
        vocab_size: tokens of the vocabulary.
        logit_bytes: bytes of a logit in the model's precision.
        ranks: ranks of tensor parallelism, each of which ends up with all logits.
        counted: True if our token counts are used. V2 uses vLLM's, which exist when vLLM measures memory.
    """
    rows = max(rows, samples)
    entries = rows * vocab_size
    return StepMemory(
        logits=entries * logit_bytes,
        gathered=entries * logit_bytes * (ranks + 1) // ranks if ranks > 1 else 0,
        edited=entries * _FLOAT,
        parts=_PARTS * PART_BYTES,
        scratch=rows * (PIECES * _PIECE_BYTES + KEYS * 4 + _STATES * STATE * 8),
        counts=int(_GROWTH * samples * vocab_size * _FLOAT) if counted else 0,
    )


# Sizes beyond vLLM's: `_PER_OCTAVE` in each octave, so that at most a sixteenth of a step is padding, and at least
# `_CLOSEST` apart, as vLLM's own are.
_PER_OCTAVE, _CLOSEST = 16, 8


def graph_sizes(
    own: Sequence[int], max_samples: int, draft_window: int, row_capacity: int
) -> tuple[int, ...]:
    """Return the sizes to capture, ascending: vLLM's, then larger ones for steps that verify drafts.

    Args:
        own: sizes that vLLM chose for the device and this many samples; if it captures none, neither do we.
        max_samples: samples that run at once.
        draft_window: most draft tokens of a sample in one step; 0 verifies none, and vLLM's list is kept.
        row_capacity: most verified tokens of a step.
    """
    if not own or not draft_window:
        return tuple(own)
    most = max(max_samples, min(max_samples * (1 + draft_window), row_capacity))
    sizes, size = sorted(set(own)), max(own)
    while size < most:
        octave = 1 << (size.bit_length() - 1)
        step = max(octave // _PER_OCTAVE, _CLOSEST)
        size = min((size // step + 1) * step, most)
        sizes.append(size)
    return tuple(sizes)


def prompt_rows(scheduler: Any, most: int) -> int:
    """Return the number of prompt tokens that the next step can compute, at most `most`.

    They include tokens that samples compute again, after a preemption or a refused draft. vLLM schedules running
    samples in order of arrival, then waiting ones while it has seats.
    """
    places = max(0, scheduler.max_num_running_reqs - len(scheduler.running))
    rows = 0
    for request in chain(scheduler.running, islice(scheduler.waiting, places)):
        # Every decoding sample needs one token anyway.
        rows += max(0, request.num_tokens - request.num_computed_tokens - 1)
        if rows >= most:
            return most
    return rows
