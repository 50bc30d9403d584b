"""Which tokens the head can draft: the most frequent ones of the first rollouts. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from services.drafter.rollout import Rollout


def choose_vocabulary(rollouts: Sequence[Rollout], vocabulary: int, size: int) -> list[int]:
    """`size` of `vocabulary` token ids, rising.

    The most frequent of the responses; where they have too few, those of the prompts, and then the lowest ids. Of
    equally frequent ones the lower id.
    """
    if size >= vocabulary:
        return list(range(vocabulary))
    responses = Counter(token for rollout in rollouts for token in rollout.response)
    prompts = Counter(token for rollout in rollouts for token in rollout.prompt)
    order = sorted(
        (responses.keys() | prompts.keys()), key=lambda token: (-responses[token], -prompts[token], token)
    )
    chosen = dict.fromkeys(order[:size])
    for token in range(vocabulary):
        if len(chosen) >= size:
            break
        chosen.setdefault(token)
    return sorted(chosen)
