"""From what an instance lists to what the plan is made from. Pure."""

from __future__ import annotations

from paceline.internal.v1 import migration_pb2 as pb
from services.reallocator.lifetimes import Lifetimes
from services.reallocator.records import Candidate, Standing
from services.reallocator.threshold import Roofline


def mean_length(listed: pb.ListSamplesResponse) -> float:
    """Tokens of a sample, prompt included; 1 where there is none."""
    lengths = [each.prompt_tokens + each.response_tokens for each in listed.samples]
    return sum(lengths) / len(lengths) if lengths else 1.0


def standing(
    instance_id: str,
    model: str,
    listed: pb.ListSamplesResponse,
    roofline: Roofline,
    lifetimes: Lifetimes,
    *,
    gives: bool,
    receives: bool,
) -> Standing:
    """An instance by what it lists, and by how long samples have been found to go on. Those of one model and policy
    version are peers."""
    curve = roofline.curve()
    samples = len(listed.samples)
    return Standing(
        instance_id=instance_id,
        samples=samples,
        room=max(0, min(listed.free_seats, listed.max_running - samples)),
        free_blocks=listed.free_blocks,
        curve=curve,
        threshold=roofline.threshold(curve),
        candidates=tuple(_candidate(each, lifetimes) for each in listed.samples),
        peers=(model, listed.policy_version),
        gives=gives,
        receives=receives,
    )


def _candidate(listed: pb.ListedSample, lifetimes: Lifetimes) -> Candidate:
    return Candidate(
        key=listed.key,
        tokens=listed.prompt_tokens + listed.response_tokens,
        accepted=listed.acceptance,
        remaining=lifetimes.remaining(listed.response_tokens, listed.max_tokens),
        blocks=listed.kv_blocks,
        movable=listed.immovable == pb.MOVE_REASON_UNSPECIFIED,
    )
