"""Translate the samples that an instance lists into the view that the plan uses. Pure."""

from __future__ import annotations

from paceline.internal.v1 import migration_pb2 as pb
from services.reallocator.planning.records import Candidate, InstanceView
from services.reallocator.planning.remaining_length import RemainingLengthEstimator
from services.reallocator.planning.throughput import Roofline


def mean_length(listed: pb.ListSamplesResponse) -> float:
    """Return the mean tokens of a sample, prompt included; 1 without samples."""
    lengths = [each.prompt_tokens + each.response_tokens for each in listed.samples]
    return sum(lengths) / len(lengths) if lengths else 1.0


def instance_view(
    instance_id: str,
    model: str,
    listed: pb.ListSamplesResponse,
    roofline: Roofline,
    remaining_lengths: RemainingLengthEstimator,
    *,
    gives: bool,
    receives: bool,
) -> InstanceView:
    """Return the view of an instance. Instances of one model and policy version are peers."""
    curve = roofline.curve()
    samples = len(listed.samples)
    return InstanceView(
        instance_id=instance_id,
        samples=samples,
        room=max(0, min(listed.free_capacity, listed.max_running - samples)),
        free_blocks=listed.free_blocks,
        curve=curve,
        threshold=roofline.threshold(curve),
        candidates=tuple(_candidate(each, remaining_lengths) for each in listed.samples),
        peers=(model, listed.policy_version),
        gives=gives,
        receives=receives,
    )


def _candidate(listed: pb.ListedSample, remaining_lengths: RemainingLengthEstimator) -> Candidate:
    return Candidate(
        key=listed.key,
        tokens=listed.prompt_tokens + listed.response_tokens,
        accepted=listed.acceptance,
        remaining=remaining_lengths.remaining(listed.response_tokens, listed.max_tokens),
        blocks=listed.kv_blocks,
        movable=listed.immovable == pb.MOVE_REASON_UNSPECIFIED,
    )
