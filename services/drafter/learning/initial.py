"""A fresh head: silent in its layer, so that it begins with what the policy's features say by themselves."""

from __future__ import annotations

import torch
from torch import nn

from services.drafter.learning.head import Head
from services.drafter.learning.target import Policy

_SPREAD = 0.02
"""Standard deviation of fresh weights at a hidden size of 2048; it falls with the root of the size."""
_ROWS = 0.5
"""Output rows begin as the policy's times this. Never as they are: vLLM shares the policy's own output layer with a
head whose rows equal it, and would write the head's next weights there."""


@torch.no_grad()
def start_from_policy(head: Head, policy: Policy, generator: torch.Generator) -> None:
    """Draw all weights anew. Features begin as the highest layer's, output rows as the policy's, scaled."""
    hidden = head.shape.hidden
    spread = _SPREAD * (2048 / hidden) ** 0.5
    for parameter in head.parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            drawn = torch.empty(parameter.shape).normal_(0.0, spread, generator=generator)
            parameter.copy_(drawn)
    for silent in (head.midlayer.self_attn.o_proj, head.midlayer.mlp.down_proj):
        silent.weight.mul_(0.1)
    head.fc.weight[:, -hidden:] += torch.eye(hidden, device=head.fc.weight.device)
    output = policy.output_layer
    assert isinstance(output, nn.Linear), "the policy was checked to have one"
    rows = output.weight if head.tokens is None else output.weight[head.tokens]
    head.lm_head.weight.copy_(_ROWS * rows.float())
