"""Rollouts for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from services.contracts.rollout import RolloutKind, StoredRollout


def rollout(tokens: Sequence[int] = (1, 2, 3), **fields: Any) -> StoredRollout:
    """Return a rollout of history of slot 0 of prompt "p" of run "r", but for the fields given."""
    logprobs = fields.pop("logprobs", [-1.0] * len(tokens))
    known: dict[str, Any] = {
        "run_id": "r",
        "prompt_id": "p",
        "slot": 0,
        "version": 1,
        "kind": RolloutKind.HISTORY,
        "step": 1,
        "seed": 1,
        "finished": True,
    }
    return StoredRollout(
        tokens=np.asarray(tokens, np.uint32), logprobs=np.asarray(logprobs, np.float32), **(known | fields)
    )
