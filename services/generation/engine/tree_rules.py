"""Decide which samples verify draft trees. Pure; model_support.py decides which engines do.

What is refused verifies the primary chain of each draft, as if there were no branches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernels.short_query_attention.inputs import LONGEST_TREE
from services.generation.engine.sampling.noise import CACHED_KEY, NOISE_KEY, RECORDED_KEY
from services.generation.engine.types import Verifier

MOST_DRAFTED = LONGEST_TREE - 1
"""Tokens of the largest tree: a mask has a bit for each, and one for the root."""


def sample_refusal(extra: Mapping[str, Any]) -> str | None:
    """Return why a sample verifies chains only; None if it can verify trees.

    Args:
        extra: what travels with it to the sampler (sampling/noise.py).
    """
    noise = extra[NOISE_KEY]
    penalties = (noise["presence_penalty"], noise["frequency_penalty"], noise["repetition_penalty"] - 1)
    reasons = (
        (
            noise["verifier"] is not Verifier.COUPLED or CACHED_KEY in extra or RECORDED_KEY in extra,
            "it is not verified by coupled sampling alone",
        ),
        (bool(noise["json_schema"]), "it follows a grammar"),
        (any(penalties), "it has penalties"),
    )
    return next((reason for applies, reason in reasons if applies), None)
