"""Batches of a run in order, each announced while the one before it is generated."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, TypedDict, Unpack

from paceline import convert
from paceline import types as t
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.rollout import AsyncRollout
    from paceline.run_rollouts import RunRollouts

log = logging.getLogger("paceline")

Batches = Iterable[Iterable[t.Group]] | AsyncIterable[Iterable[t.Group]]
"""The groups of each step, in order."""


class RolloutOptions(TypedDict, total=False):
    """Options of every batch: those of `rollout` beside its groups and sampling parameters."""

    deadline: float | None
    priority: int
    weight: int
    max_staleness: int | None
    stale: t.Stale


async def look_ahead(
    run: RunRollouts,
    batches: Batches,
    sampling: t.SamplingParams | None,
    exactness: t.Exactness | None,
    first_step: int,
    **options: Unpack[RolloutOptions],
) -> AsyncGenerator[AsyncRollout, None]:
    """Submit a batch for each step, announce the one after it, and yield its rollout.

    The next batch is taken from `batches` after its predecessor was submitted, so a slow source delays no samples.
    """
    async with aclosing(_in_order(batches)) as source:
        step, groups = first_step, await anext(source, None)
        while groups is not None:
            rollout = await run.rollout(step, groups, sampling, exactness=exactness, **options)
            step, groups = step + 1, await anext(source, None)
            if groups is not None:
                await _announce(run, step, groups, sampling, exactness, rollout.batch.policy_version + 1)
            yield rollout


async def _in_order(batches: Batches) -> AsyncGenerator[list[t.Group], None]:
    """Yield the groups of each step, of which all is at hand: they are sent twice."""
    if isinstance(batches, AsyncIterable):
        async for each in batches:
            yield convert.whole_groups(each)
        return
    for each in batches:
        yield convert.whole_groups(each)


async def _announce(
    run: RunRollouts,
    step: int,
    groups: list[t.Group],
    sampling: t.SamplingParams | None,
    exactness: t.Exactness | None,
    policy_version: int,
) -> None:
    """Announce a step. A failure costs speed alone, so it must not end the training."""
    try:
        await run.hint(step, groups, sampling, policy_version=policy_version, exactness=exactness)
    except PacelineError as error:
        log.warning("step %d of run %s was not announced: %s", step, run.run_id, error)
