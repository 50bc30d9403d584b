"""Fix vLLM 0.32's speculative sampling on CPU, for the baselines of a benchmark only.

`expand_batch_to_tokens` returns uninitialised memory on CPU (vllm#55005). A batch at temperature > 0 is then
verified with arbitrary temperatures and accepts garbage, which would make vLLM's methods look better than they are.
"""

from __future__ import annotations

import torch


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat each sample's value for its tokens, [n] -> [num_tokens]; `replace_from` becomes `replace_to`."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def apply() -> None:
    """Apply the fix in this process."""
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
