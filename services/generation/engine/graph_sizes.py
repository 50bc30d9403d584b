"""Choose the numbers of tokens of a step for which there are CUDA graphs. Pure.

vLLM's own list is made for plain decoding: it ends at twice the samples or at a number of the device's (512 on
an H100), whichever is less. A step that verifies k drafts of each of n samples has n (k + 1) tokens, and beyond the
list it is launched kernel by kernel. The planner verifies as many tokens as graphs have
(speculation/batch_sizes.py), which it reads off the configuration that the workers captured by.
"""

from __future__ import annotations

from collections.abc import Sequence

# Sizes beyond vLLM's: so many in each octave, so that at most a sixteenth of a step is padding, and no closer
# together than vLLM's own.
_PER_OCTAVE, _CLOSEST = 16, 8


def graph_sizes(
    own: Sequence[int], max_samples: int, draft_window: int, row_capacity: int
) -> tuple[int, ...]:
    """Return the sizes to capture, rising: vLLM's, and those of verifying steps beyond them.

    Args:
        own: what vLLM chose for the device and for as many samples; empty where it captures none, and so do we.
        max_samples: that run at once.
        draft_window: most draft tokens of a sample in one step; 0: nothing is verified, and vLLM's list holds.
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
