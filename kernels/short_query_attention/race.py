"""A second of timing for attention backends, over one model's heads and lengths.

An engine makes it at its start. Lengths are even, skewed, and even with drafts, since backends differ most in how
they share out unlike requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from kernels.short_query_attention import rivals
from kernels.short_query_attention.attend import attend
from kernels.short_query_attention.choice import AttentionName, Timing
from kernels.short_query_attention.inputs import AttentionStep
from kernels.short_query_attention.random_steps import AttentionShape, random_step
from kernels.timing import Run, timer

MOST_BYTES = 1 << 30
"""Memory of the KV that is read."""
_MILLISECONDS = 60
Maker = Callable[[AttentionStep], Run]


@dataclass(frozen=True, slots=True)
class RaceShape:
    """Heads of a model on one device, the context of a usual sample and of a long one, and the samples at once."""

    heads: int
    kv_heads: int
    head_size: int
    context: int
    long: int
    requests: int

    def within(self, most_bytes: int) -> RaceShape:
        """Return the same with as many samples, and then as long a context, as fit the memory."""
        position = 4 * self.kv_heads * self.head_size
        long = max(1, min(self.long, most_bytes // 2 // position))
        context = max(1, min(self.context, long))
        requests = max(1, min(self.requests, (most_bytes // position - long) // context))
        return replace(self, long=long, context=context, requests=requests)


def attending(step: AttentionStep) -> Run:
    """Return our attention of a step."""
    return partial(attend, step, backend="triton")


def backends(*, ours: bool) -> dict[AttentionName, Maker]:
    """Return makers of what is timed: vLLM's own attention, FlashInfer's, and with `ours` ours."""
    found: dict[AttentionName, Maker] = {
        AttentionName.VLLM: rivals.vllm_own_attention,
        AttentionName.FLASHINFER: rivals.flashinfer_attention,
    }
    return found | ({AttentionName.OURS: attending} if ours else {})


def race(device: torch.device, shape: RaceShape, makers: Mapping[AttentionName, Maker]) -> Iterator[Timing]:
    """Time each backend in each case. One that does not run has its error, and infinite times."""
    fitting = shape.within(MOST_BYTES)
    # "one long" has contexts of a quarter of the usual one around it.
    step_shape = AttentionShape(
        fitting.heads, fitting.kv_heads, fitting.head_size, fitting.context, fitting.long
    )
    timed = timer(device, _MILLISECONDS)
    count = fitting.requests
    cases = (("even", "even", 0), ("one long", "one long", 0), ("drafts", "even", max(1, count // 4)))
    for name, kind, drafted in cases:
        step = random_step(device, step_shape, kind, count, drafted=drafted)
        for backend, maker in makers.items():
            try:
                yield Timing(backend, name, timed(maker(step)))
            except Exception as error:  # Libraries that may be absent, or of another version; compilers.
                yield Timing(backend, name, float("inf"), f"{type(error).__name__}: {str(error)[:200]}")
