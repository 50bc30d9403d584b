"""Messages to plan with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.internal.v1 import bubble_pb2 as pb
from services.contracts.seeds import sample_seed


def hint(
    groups: Mapping[str, float], *, step: int = 1, slots: int = 2, run_id: str = "run", name: str = ""
) -> pb.PutHintRequest:
    """Return a hint for prompts with these expected lengths, `slots` samples each."""
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


def run_status(
    phase: pb.RunPhase, policy_version: int, step: int, unfinished: int = 0, waiting: int = 0
) -> pb.SetRunRequest:
    """Return the status of a run, without its name and hints."""
    return pb.SetRunRequest(
        phase=phase, policy_version=policy_version, step=step, unfinished=unfinished, waiting=waiting
    )


def named(status: pb.SetRunRequest, run_id: str, hint_ids: Sequence[str]) -> pb.SetRunRequest:
    """Return a status under the name of a run, with its hints."""
    request = pb.SetRunRequest(run_id=run_id, hint_ids=hint_ids)
    request.MergeFrom(status)
    return request


def progress_of(lease: int, tokens: int = 0, **fields: Any) -> pb.PregenerationProgress:
    """Return the progress of a lease."""
    return pb.PregenerationProgress(lease=lease, tokens=tokens, **fields)


def work_poll(
    name: str,
    epoch: int,
    policy_version: int,
    room: int,
    progress: Sequence[pb.PregenerationProgress] = (),
    serving: bool = False,
) -> pb.PollWorkRequest:
    """Return a poll of an instance."""
    return pb.PollWorkRequest(
        instance_id=name,
        epoch=epoch,
        policy_version=policy_version,
        room=room,
        progress=progress,
        serving=serving,
    )
