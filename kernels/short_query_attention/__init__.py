"""Unified short-query attention over a paged KV cache (BubbleSpec, section 3.3).

Decoding and verifying requests go through one launch: the query tokens of a request and the query heads that share
a key-value head fill one tile of the tensor cores, so the cost is that of reading the keys, and a few more query
tokens add little. attend.py is the entry, inputs.py describes a step, and race.py chooses the fastest backend.
"""

from kernels.short_query_attention.attend import attend
from kernels.short_query_attention.inputs import AttentionStep

__all__ = ["AttentionStep", "attend"]
