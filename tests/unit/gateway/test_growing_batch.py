"""Batches that grow: what is added to them, when they are over, and which of their samples are too old."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from paceline.columns import VersionMark
from paceline.internal.v1 import generation_pb2
from paceline.v1 import rollout_pb2, sample_pb2
from services.contracts.sampling import ModelLimits
from services.gateway.api.validation import as_submission, check_groups, check_submit
from services.gateway.journal.journal import merged
from services.gateway.journal.record import BatchHead, BatchRecord
from services.gateway.state.messages import BatchBuilder, build_groups
from services.gateway.state.sample import BatchGroup, EventEffect, GatewaySample, SamplePhase
from services.gateway.state.update_book import PublishedVersion, UpdateBook
from tests.support.token_columns import columns
from tests.unit.gateway.scheduler_parts import SchedulerParts, a_batch, turn

LIMITS = ModelLimits(vocab_size=100, max_model_len=64)
BUILDER = BatchBuilder(max_seconds=10.0, max_attempts=3)
STOPPED = generation_pb2.Finished(finish_reason=sample_pb2.FINISH_REASON_STOP)


def group(prompt_id: str, samples: int = 2) -> rollout_pb2.Group:
    return rollout_pb2.Group(prompt_id=prompt_id, prompt_token_ids=[1, 2], samples=samples)


def an_open_record(*groups: rollout_pb2.Group) -> BatchRecord:
    request = rollout_pb2.SubmitRolloutsRequest(run_id="run", batch_id="b", groups=groups)
    total = sum(each.samples for each in groups)
    return BatchRecord(request, BatchHead("digest", 0.0, total, None, open=True), 1)


def test_only_groups_that_are_not_there_are_new_and_one_that_differs_is_named() -> None:
    record = an_open_record(group("p"))
    new = record.new_groups([group("p"), group("q"), group("r", 3)])
    assert [each.prompt_id for each in new] == ["q", "r"]
    record.extend(new, 20)
    assert record.new_groups([group("r", 3), group("p"), group("q")]) == []
    assert (record.total, record.index_of("q", 1), record.index_of("r", 2)) == (7, 3, 6)
    assert record.index_of("r", 3) is None
    with pytest.raises(ValueError, match="1"):
        record.new_groups([group("s"), group("q", 5)])


def test_a_batch_is_neither_complete_nor_acknowledged_before_it_is_closed() -> None:
    record = an_open_record(group("p"))
    last = [record.end(index, b"x") for index in range(2)][-1]
    record.confirm(range(2))
    record.trimmed(len(record.acknowledge(last)) and record.acked)
    assert (record.is_complete, record.is_acknowledged, record.request is None) == (False, False, False)
    record.extend([group("q")], 10)
    last = [record.end(index, b"x") for index in (2, 3)][-1]
    record.confirm((2, 3))
    record.acknowledge(last)
    record.trimmed(record.acked)
    record.close()
    assert (record.is_complete, record.is_acknowledged, record.request) == (True, True, None)


def test_an_empty_batch_is_complete_once_it_is_closed() -> None:
    record = an_open_record()
    assert not record.is_complete
    record.close()
    assert (record.is_complete, record.is_acknowledged) == (True, False)


@given(st.lists(st.lists(st.integers(1, 5), max_size=4), max_size=5), st.booleans())
def test_a_batch_that_grew_equals_one_that_was_submitted_whole(sizes: list[list[int]], coupled: bool) -> None:
    """Also as the journal has it: the request, and then what was added."""
    level = sample_pb2.EXACTNESS_LEVEL_COUPLED_HISTORY if coupled else sample_pb2.EXACTNESS_LEVEL_EXACT
    header = rollout_pb2.SubmitRolloutsRequest(
        run_id="run", batch_id="b", step=4, run_seed=9, exactness=sample_pb2.Exactness(level=level)
    )
    names = iter(f"p{number}" for number in range(100))
    additions = [[group(next(names), size) for size in part] for part in sizes]
    parts = [rollout_pb2.SubmitRolloutsRequest(groups=part).SerializeToString() for part in additions]
    whole = merged(header.SerializeToString(), parts)
    assert list(whole.groups) == [each for part in additions for each in part]
    submitted, batch = BUILDER.from_submission(whole, 0.0), BUILDER.from_submission(header, 0.0, opened=True)
    for part in additions:
        groups, samples = build_groups(header, part, batch.exactness, len(batch.groups), len(batch.samples))
        batch.groups.extend(groups)
        batch.samples.extend(samples)
    assert batch.samples == submitted.samples
    assert [(each.prompt_id, each.first, each.count) for each in batch.groups] == [
        (each.prompt_id, each.first, each.count) for each in submitted.groups
    ]
    assert (batch.open, submitted.open) == (True, False)


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [
        ({}, []),
        ({"max_staleness": 0}, []),
        ({"max_staleness": 3, "stale": rollout_pb2.STALE_REGENERATE}, []),
        ({"stale": rollout_pb2.STALE_REFUSE}, ["stale"]),
        ({"max_staleness": 3, "stale": 9}, ["stale"]),
        ({"batch_id": "no/name"}, ["batch_id"]),
    ],
)
def test_an_opening_is_checked_like_a_submission_but_for_its_groups(
    fields: dict[str, Any], at_fault: list[str]
) -> None:
    request = rollout_pb2.OpenBatchRequest(**{"run_id": "run", "batch_id": "b", **fields})
    found = check_submit(as_submission(request), LIMITS, opens=True)
    assert [each.field for each in found] == at_fault


def test_an_opening_keeps_what_is_set_and_nothing_else() -> None:
    names = {each.name for each in rollout_pb2.OpenBatchRequest.DESCRIPTOR.fields}
    wanted = {each.name for each in rollout_pb2.SubmitRolloutsRequest.DESCRIPTOR.fields}
    assert names == wanted - {"groups"}
    empty = as_submission(rollout_pb2.OpenBatchRequest(run_id="run", batch_id="b"))
    assert {each.name for each, _ in empty.ListFields()} <= {"run_id", "batch_id", "sampling", "exactness"}
    assert not empty.HasField("deadline")
    assert not empty.HasField("max_staleness")


def test_added_groups_are_checked_with_the_batchs_parameters() -> None:
    batch = rollout_pb2.SubmitRolloutsRequest(sampling=sample_pb2.SamplingParams(max_tokens=60))
    found = check_groups([group("p"), group("q", 0), group("p")], batch, LIMITS)
    assert [each.field for each in found] == ["groups[1].samples", "groups[2].prompt_id"]
    least = rollout_pb2.SubmitRolloutsRequest(sampling=sample_pb2.SamplingParams(min_tokens=63))
    (long,) = check_groups([group("p")], least, LIMITS)
    assert "groups[0]" in long.field
    assert [each.field for each in check_groups([], batch, LIMITS)] == ["groups"]


def test_a_batch_across_versions_goes_on_under_any_and_others_where_the_update_says_so() -> None:
    book = UpdateBook(60.0, PublishedVersion(5, since=4))
    assert [book.version_for(version) for version in (3, 4, 5)] == [None, 5, 5]
    assert [book.version_for(version, 1) for version in (3, 4, 5)] == [5, 5, 5]


def stale_batch(*, regenerates: bool) -> Any:
    """Return a batch with a sample of version 7 that runs, and is two versions behind, where one is allowed."""
    batch = a_batch(2, max_staleness=1, regenerates=regenerates)
    batch.current_version = first = batch.policy_version
    attempt = batch.assign(0, "i0", 1.0)
    assert batch.extend(0, attempt, columns([5, 6], [-1.0, -2.0]), 2.0)
    batch.current_version = first + 1
    assert not batch.is_stale(0)
    batch.current_version = first + 2
    assert batch.is_stale(0)
    assert not batch.is_stale(1), "it has no tokens"
    return batch


def test_a_sample_that_is_renewed_begins_without_tokens_and_its_last_attempt_is_ignored() -> None:
    batch = stale_batch(regenerates=True)
    assert batch.renew(0) is EventEffect.WAITING
    assert (batch.held_tokens, batch.unjournaled) == (0, set())
    assert not batch.extend(0, 1, columns([7], [-1.0]), 3.0)
    assert batch.finish(0, 1, STOPPED, 3.0) is EventEffect.IGNORED
    attempt = batch.assign(0, "i1", 4.0)
    assert attempt == 2
    assert batch.extend(0, attempt, columns([8], [-1.0]), 5.0)
    assert batch.finish(0, attempt, STOPPED, 6.0) is EventEffect.ENDED
    assert list(batch.samples[0].tokens) == [8]
    assert batch.samples[0].columns.versions == [VersionMark(0, batch.current_version)]
    assert not batch.is_stale(0)


@pytest.mark.parametrize("regenerates", [True, False])
def test_a_sample_whose_old_tokens_came_late_is_caught_at_its_end(regenerates: bool) -> None:
    batch = stale_batch(regenerates=regenerates)
    effect = batch.finish(0, 1, STOPPED, 3.0)
    if regenerates:
        assert (effect, batch.samples[0].phase) == (EventEffect.WAITING, SamplePhase.WAITING)
        assert (batch.samples[0].resubmissions, batch.held_tokens) == (1, 0)
    else:
        assert effect is EventEffect.ENDED
        assert batch.endings[0].status == sample_pb2.SAMPLE_STATUS_ABORTED
        assert list(batch.samples[0].tokens) == [5, 6]


def test_without_a_bound_nothing_is_too_old() -> None:
    batch = a_batch()
    attempt = batch.assign(0, "i0", 1.0)
    assert batch.extend(0, attempt, columns([5], [-1.0]), 2.0)
    batch.current_version += 100
    assert not batch.is_stale(0)


async def test_samples_that_are_added_when_their_version_has_just_gone_end_like_the_others() -> None:
    parts = SchedulerParts()
    batch = a_batch(1, open=True)
    running = parts.scheduler.add(batch)
    parts.scheduler.continue_under(running, None)
    parts.scheduler.extend(running, *two_more())
    await parts.until(lambda: batch.ended == 3)
    assert {each.status for each in batch.endings} == {sample_pb2.SAMPLE_STATUS_ABORTED}
    assert (parts.batches.unfinished, parts.batches.held) == (0, 3)


async def test_samples_that_are_added_when_the_deadline_has_just_passed_end_like_the_others() -> None:
    parts = SchedulerParts()
    link = parts.link("a")
    batch = a_batch(1, seconds=0.0, open=True)
    running = parts.scheduler.add(batch)
    await turn()
    assert link.aborted == [link.items[0].handle], "and is not answered"
    parts.scheduler.extend(running, *two_more())
    await turn()
    assert [each.cancelled for each in batch.samples] == [True] * 3
    assert parts.metric("expired_samples_total") == 3
    assert batch.ended == 2


def two_more() -> tuple[list[BatchGroup], list[GatewaySample]]:
    """Return a second group, of two samples."""
    group = BatchGroup("q", [1], sample_pb2.SamplingParams(), first=1, count=2)
    return [group], [GatewaySample(index, 1, index - 1, 7) for index in (1, 2)]
