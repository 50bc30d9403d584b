"""How far a sample repeats a cached rollout. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.drafts.rollout import Rollout


def agreement(rollout: Rollout, response: Sequence[int]) -> int:
    """How many tokens of the response agree with the rollout before the first that does not, or the end of one."""
    length = min(len(rollout.tokens), len(response))
    differs = rollout.tokens[:length] != np.asarray(response[:length], np.int64)
    return int(differs.argmax()) if differs.any() else length
