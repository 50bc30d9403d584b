"""Ways to spread an engine over devices: which there are, and why others are refused. Pure.

Tensor parallelism divides every layer, and experts can be divided by whole ones instead. In both every rank has
all layers of a token and all logits, and the sampler of every rank picks the same token, so nothing here depends on
which it is but rounding.
"""

from __future__ import annotations


def parallelism_refusal(*, tensor: int, experts: bool, pipeline: int, data: int) -> tuple[str, str]:
    """Return the option that cannot be had and why; two empty strings if there is none.

    Args:
        tensor: ranks of tensor parallelism.
        experts: whole experts for each rank.
        pipeline: stages of a pipeline.
        data: replicas within one engine.
    """
    reasons = (
        (
            pipeline > 1,
            "pipeline_parallel_size",
            "an instance steps one batch at a time, so the stages of a pipeline would wait for one another, and KV "
            "moves between ranks that have every layer: use tensor_parallel_size",
        ),
        (
            data > 1,
            "data_parallel_size",
            "replicas within an engine step in lockstep, each for the longest of all, and place samples "
            "themselves: use more instances, among which the gateway places samples and moves them",
        ),
        (
            experts and tensor == 1,
            "enable_expert_parallel",
            "experts are divided among the ranks of tensor_parallel_size, which is 1",
        ),
    )
    return next(((option, reason) for applies, option, reason in reasons if applies), ("", ""))
