"""Makes rollouts."""

from __future__ import annotations

from typing import Any

import numpy as np

from services.contracts.rollout import RolloutKind, StoredRollout


def make(
    prompt: str = "p",
    slot: int = 0,
    kind: RolloutKind = RolloutKind.HISTORY,
    *,
    step: int = 1,
    version: int | None = None,
    length: int = 10,
    **fields: Any,
) -> StoredRollout:
    """Return a rollout whose tokens tell it from others; `version` is the step unless given."""
    first = step * 1000 + slot
    return StoredRollout(
        run_id=fields.get("run", "run"),
        prompt_id=prompt,
        slot=slot,
        version=step if version is None else version,
        kind=kind,
        step=step,
        seed=fields.get("seed", 7),
        tokens=np.arange(first, first + length, dtype=np.uint32),
        logprobs=-np.arange(length, dtype=np.float32),
        finished=fields.get("finished", kind is RolloutKind.HISTORY),
        fork=fields.get("fork", 0),
    )


def ahead(prompt: str = "p", slot: int = 0, **fields: Any) -> StoredRollout:
    """Return a pre-generated one."""
    return make(prompt, slot, RolloutKind.PREGENERATED, **fields)


def assert_same(one: StoredRollout, other: StoredRollout) -> None:
    """Every field is equal."""
    assert describe(one) == describe(other)


def describe(rollout: StoredRollout) -> tuple[object, ...]:
    """All of a rollout, as something that can be compared."""
    return (
        rollout.run_id,
        rollout.prompt_id,
        rollout.slot,
        rollout.version,
        rollout.kind,
        rollout.step,
        rollout.seed,
        rollout.finished,
        rollout.fork,
        rollout.tokens.tolist(),
        rollout.logprobs.tolist(),
    )
