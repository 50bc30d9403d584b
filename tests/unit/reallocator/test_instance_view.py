"""From what an instance lists to what the plan sees; receivers that are left alone."""

from __future__ import annotations

import pytest

from paceline.internal.v1 import migration_pb2 as pb
from services.reallocator.moves import UnreachableReceivers
from services.reallocator.planning.decision_scope import instance_view, mean_length
from services.reallocator.planning.learned_costs import RemainingLengthEstimator
from services.reallocator.planning.throughput import Architecture, Roofline, StepTime

MODEL = StepTime(
    architecture=Architecture(weight_bytes=1e9, kv_bytes=1e5, dense_flops=1e9, attention_flops=1e4)
)


def listed(**fields: int) -> pb.ListSamplesResponse:
    return pb.ListSamplesResponse(
        samples=[
            pb.ListedSample(
                key="a", prompt_tokens=10, response_tokens=50, max_tokens=500, acceptance=1.5, kv_blocks=4
            ),
            pb.ListedSample(
                key="b",
                prompt_tokens=10,
                response_tokens=450,
                max_tokens=500,
                immovable=pb.MOVE_REASON_REUSING,
            ),
        ],
        **({"free_blocks": 70, "max_running": 8, "free_capacity": 6, "policy_version": 3} | fields),
    )


def test_an_instance_stands_as_it_lists() -> None:
    found = instance_view(
        "i0",
        "m",
        listed(),
        Roofline(MODEL.seconds, 8),
        RemainingLengthEstimator(),
        gives=True,
        receives=False,
    )
    assert (found.samples, found.room, found.free_blocks, found.peers) == (2, 6, 70, ("m", 3))
    assert (found.gives, found.receives, len(found.curve.seconds)) == (True, False, 8)
    first, second = found.candidates
    assert (first.tokens, first.accepted, first.blocks) == (60, 1.5, 4)
    assert first.remaining == pytest.approx(50, rel=0.3), "as long again"
    assert (first.movable, second.movable) == (True, False)
    assert second.remaining == pytest.approx(47, abs=3), "the limit ends it before it doubles"


@pytest.mark.parametrize(("fields", "room"), [({"free_capacity": 0}, 0), ({"max_running": 1}, 0), ({}, 6)])
def test_room_is_what_runs_at_once_and_what_may_be_received(fields: dict[str, int], room: int) -> None:
    assert (
        instance_view(
            "i",
            "m",
            listed(**fields),
            Roofline(MODEL.seconds, 8),
            RemainingLengthEstimator(),
            gives=True,
            receives=True,
        ).room
        == room
    )


def test_the_mean_length_counts_prompts() -> None:
    assert mean_length(listed()) == 260.0
    assert mean_length(pb.ListSamplesResponse()) == 1.0


def test_a_receiver_that_fails_is_left_alone_for_longer_and_longer() -> None:
    unreachable = UnreachableReceivers()
    assert not unreachable.is_avoided("a", 1, 0.0)
    unreachable.failed("a", 1, 0.0)
    assert unreachable.is_avoided("a", 1, 0.9)
    assert not unreachable.is_avoided("a", 1, 1.0)
    unreachable.failed("a", 1, 1.0)
    assert unreachable.is_avoided("a", 1, 2.9)
    unreachable.worked("a")
    assert not unreachable.is_avoided("a", 1, 2.9)
    unreachable.failed("a", 1, 3.0)
    assert not unreachable.is_avoided("a", 1, 4.0), "it begins anew"
    for n in range(20):
        unreachable.failed("a", 1, 100.0 * n)
    assert unreachable.is_avoided("a", 1, 1929.9)
    assert not unreachable.is_avoided("a", 1, 1930.0), "never longer than half a minute"


def test_moves_that_fail_together_are_one_failure() -> None:
    unreachable = UnreachableReceivers()
    for n in range(4):
        unreachable.failed("a", 1, 0.01 * n)
    assert unreachable.is_avoided("a", 1, 0.9)
    assert not unreachable.is_avoided("a", 1, 1.0)
    unreachable.failed("a", 1, 1.0)
    assert not unreachable.is_avoided("a", 1, 3.0), "the second one"


def test_what_begins_anew_under_its_old_name_has_not_failed() -> None:
    unreachable = UnreachableReceivers()
    for n in range(6):
        unreachable.failed("a", 1, 100.0 * n)
    assert unreachable.is_avoided("a", 1, 520.0)
    assert not unreachable.is_avoided("a", 2, 520.0)
    unreachable.failed("a", 2, 520.0)
    assert unreachable.is_avoided("a", 2, 520.9)
    assert not unreachable.is_avoided("a", 2, 521.0)
