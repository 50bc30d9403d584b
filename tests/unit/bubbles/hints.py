"""Hints to plan with."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.internal.v1 import bubble_pb2 as pb
from services.platform.seeds import sample_seed


def hint(
    groups: Mapping[str, float], *, step: int = 1, slots: int = 2, run_id: str = "run", name: str = ""
) -> pb.PutHintRequest:
    """A hint for prompts with these expected lengths, `slots` samples each."""
    return pb.PutHintRequest(
        run_id=run_id,
        hint_id=name or f"{run_id}-{step}",
        step=step,
        groups=[
            pb.HintedGroup(
                prompt_id=prompt_id,
                prompt_token_ids=[1, 2, len(prompt_id)],
                seeds=[sample_seed(9, step, prompt_id, slot) for slot in range(slots)],
                expected_tokens=expected,
            )
            for prompt_id, expected in groups.items()
        ],
    )
