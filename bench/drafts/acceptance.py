"""Acceptance of both indexes' proposals on rollouts of the tinymath model, replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.drafts.indexes import (
    ARCTIC_DEPTHS,
    ARCTIC_LIMITS,
    WINDOW,
    ArcticIndex,
    ComparedIndex,
    PacelineIndex,
    arctic_missing,
    fill,
)
from bench.drafts.texts import RUNNING_PROMPTS, RunningGroup, Tokens, tinymath_groups


def measure_acceptance(groups: Sequence[RunningGroup] | None = None, window: int = WINDOW) -> dict[str, Any]:
    """Compare acceptance on tinymath rollouts, half of each prompt's cached and half replayed.

    Arctic's is that of the depth, limits and place of the prompts that accept most per step.
    """
    groups = tinymath_groups() if groups is None else groups
    cached = len(groups[0].rollouts) // 2
    most = 2 * sum(len(group.prompt) + sum(map(len, group.rollouts)) for group in groups)
    figures = {
        f"{key}_ours": value for key, value in replay(PacelineIndex(most), groups, cached, window).items()
    }
    if arctic_missing() is None:
        tried = [
            replay(ArcticIndex(depth, limits, prefixed), groups, cached, window)
            for depth in ARCTIC_DEPTHS
            for limits in ARCTIC_LIMITS
            for prefixed in (False, True)
        ]
        best = max(tried, key=lambda one: one["accepted_per_step"])
        figures |= {f"{key}_arctic": value for key, value in best.items()}
    return figures


def replay(side: ComparedIndex, groups: Sequence[RunningGroup], cached: int, window: int) -> dict[str, float]:
    """Cache the first rollouts of each group, then replay the others, some prompts at a time, in step."""
    fill(side, groups, cached)
    emitted = steps = offering = offered = accepted = 0
    for first in range(0, len(groups), RUNNING_PROMPTS):
        samples = [
            (prompt, rollout, groups[prompt])
            for prompt in range(first, min(first + RUNNING_PROMPTS, len(groups)))
            for rollout in range(cached, len(groups[prompt].rollouts))
        ]
        side.start(samples)
        texts = [group.rollouts[rollout] for _, rollout, group in samples]
        place = [0] * len(samples)
        live = list(range(len(samples)))
        new = [np.empty(0, np.int32)] * len(samples)
        while live:
            side.keep(live)
            offers = side.step([new[i] for i in live], window)
            for i, offer in zip(live, offers, strict=True):
                kept = matching(offer, texts[i][place[i] :])
                new[i] = texts[i][place[i] : place[i] + kept + 1]
                place[i] += len(new[i])
                emitted, steps, accepted = emitted + len(new[i]), steps + 1, accepted + kept
                offering, offered = offering + bool(offer), offered + len(offer)
            live = [i for i in live if place[i] < len(texts[i])]
    return {
        "tokens_per_step": emitted / steps,
        "accepted_per_step": accepted / steps,
        "accepted_per_offer": accepted / max(1, offering),
        "acceptance_rate": accepted / max(1, offered),
        "offered_per_step": offered / steps,
    }


def matching(offer: Sequence[int], text: Tokens) -> int:
    """Return how many tokens of a proposal come true."""
    for i, (guess, token) in enumerate(zip(offer, text.tolist(), strict=False)):
        if guess != token:
            return i
    return min(len(offer), len(text))
