"""Unified short-query attention over a paged KV cache (BubbleSpec, section 3.3).

Decoding and verifying requests go through one launch: the query tokens of a request and the query heads that share
a key-value head fill one tile of the tensor cores, so a few more query tokens cost what the keys cost anyway.

- inputs.py: what a step is, and what is allowed
- ancestor_mask.py: the masks of draft trees
- reference.py: plain PyTorch
- attend.py: the entry function
- launch.py: how many programs share a step, and the memory between the kernels
- triton_queue.py: the shares, worked out on the device
- triton_attend.py: the kernels: attention over a program's share, and the sum of what several left
- selfcheck.py: whether they are right on the device at hand
- random_steps.py, rivals.py, race.py, choice.py: which of several backends is the fastest here
"""

from kernels.short_query_attention.attend import attend
from kernels.short_query_attention.inputs import AttentionStep

__all__ = ["AttentionStep", "attend"]
