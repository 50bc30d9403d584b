"""Parts of batches that are too large for one call."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline import Batch, Group, SamplingParams
from paceline.batches.parts import MAX_SAMPLES, first_part, parts_of
from paceline.convert import batch_to_proto
from paceline.transport.channel import MAX_MESSAGE_BYTES
from paceline.v1 import rollout_pb2


def batch(groups: list[Group]) -> Batch:
    return Batch("run", "step-000003.v4.0", 3, 4, groups, SamplingParams(max_tokens=9), run_seed=7)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 700)), min_size=1, max_size=30))
def test_parts_have_the_groups_in_order_and_keep_the_limits(sizes: list[tuple[int, int]]) -> None:
    groups = [Group(f"p{n}", [1] * tokens, samples) for n, (samples, tokens) in enumerate(sizes)]
    parts = parts_of(batch(groups), most_samples=20, most_bytes=9000)
    assert [group for part in parts for group in part.groups] == groups
    assert len({part.batch_id for part in parts}) == len(parts)
    for part in parts:
        assert sum(group.samples for group in part.groups) <= 20
        assert (part.step, part.policy_version, part.run_seed, part.sampling) == (
            3,
            4,
            7,
            batch(groups).sampling,
        )
    assert parts == parts_of(batch(groups), most_samples=20, most_bytes=9000)


def test_a_batch_within_the_limits_is_itself() -> None:
    small = batch([Group("p", [1, 2], 4)])
    assert parts_of(small) == [small]


def test_a_hundred_thousand_samples_are_two_batches() -> None:
    groups = [Group(f"p{number}", [1, 2, 3], 16) for number in range(6250)]
    first, second = parts_of(batch(groups))
    assert sum(group.samples for group in first.groups) == MAX_SAMPLES
    assert (first.batch_id, second.batch_id) == ("step-000003.v4.0.part1of2", "step-000003.v4.0.part2of2")


def test_parts_of_long_prompts_fit_into_a_message() -> None:
    prompt = [150_000] * 8000
    groups = [Group(f"p{number}", prompt, 8) for number in range(800)]
    parts = parts_of(batch(groups))
    sizes = [batch_to_proto(part, rollout_pb2.SubmitRolloutsRequest).ByteSize() for part in parts]
    assert max(sizes) <= MAX_MESSAGE_BYTES
    assert min(sizes[:-1]) > 0.99 * MAX_MESSAGE_BYTES - 65_536
    assert list(first_part(groups)) == list(parts[0].groups)


def test_a_group_is_never_split_because_its_slots_are_part_of_its_seeds() -> None:
    (only,) = parts_of(batch([Group("p", [1], 50)]), most_samples=20)
    assert only.groups[0].samples == 50
