"""The way of samples through the gateway: placed, refused, lost, moved, cancelled, and delivered once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from google.rpc import code_pb2

from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import sample_pb2
from services.contracts.errors import RESUMING, ResourceExhausted
from services.gateway.scheduler.estimator import DraftCoverage
from services.gateway.scheduler.work_link import report_interval
from services.gateway.state.calls import CallRules
from services.gateway.state.messages import final_sample
from services.gateway.state.sample import SamplePhase
from tests.support.token_columns import columns
from tests.unit.gateway.scheduler_parts import (
    SchedulerParts,
    a_batch,
    finished,
    moved,
    refused,
    texts,
    tokens,
    turn,
)

ABORTED = sample_pb2.FINISH_REASON_ABORTED
SAMPLE_FAILED = sample_pb2.SAMPLE_STATUS_FAILED
SAMPLE_ABORTED = sample_pb2.SAMPLE_STATUS_ABORTED


# Placement ---------------------------------------------------------------------------------------------


async def test_samples_wait_for_room_and_follow_each_other_on_the_instance() -> None:
    parts = SchedulerParts()
    link = parts.link("a", room=2)
    running = parts.scheduler.add(a_batch(3))
    await turn()
    assert [item.slot for item in link.items] == [0, 1]
    assert (parts.batches.unfinished, parts.metric("queued_samples")) == (3, 1)
    assert parts.metric("running_samples", instance_id="a") == 2
    parts.events.responded(link, tokens(1, 5, 0))
    parts.events.responded(link, finished(1))
    await turn()
    assert [item.slot for item in link.items] == [0, 1, 2]
    assert (parts.batches.unfinished, parts.metric("queued_samples")) == (2, 0)
    assert running.batch.samples[0].phase is SamplePhase.ENDED


async def test_only_serving_instances_with_the_version_of_the_batch_get_samples() -> None:
    parts = SchedulerParts()
    paused, old, serving = parts.link("a"), parts.link("b"), parts.link("c")
    parts.fleet.quarantine("a", 1, "weights unknown", 0.0)
    old.slots.serve(6)
    parts.scheduler.add(a_batch(2))
    await turn()
    assert (len(paused.items), len(old.items), len(serving.items)) == (0, 0, 2)


async def test_a_draft_counts_for_less_work_and_is_forgotten_with_its_batch() -> None:
    parts = SchedulerParts()
    batch = a_batch(2)
    coverage = {("p", 0): DraftCoverage(40, finished=True)}
    running = parts.scheduler.add(batch, coverage=coverage)
    drafted, plain = (parts.estimator.remaining(batch, index) for index in (0, 1))
    assert (drafted, plain) == (0.15 * 40, 50.0)
    parts.scheduler.drop(running)
    assert parts.estimator.remaining(batch, 0) == 50.0


async def test_the_bound_on_unfinished_samples_covers_those_being_recorded() -> None:
    parts = SchedulerParts(max_samples=4)
    parts.scheduler.add(a_batch(2))
    with parts.batches.reserve(2):
        assert parts.batches.unfinished == 4
        with pytest.raises(ResourceExhausted), parts.batches.reserve(1):
            pass
    assert parts.batches.unfinished == 2


async def test_ends_are_waited_for_by_samples_without_a_place_and_by_environments() -> None:
    parts = SchedulerParts()
    link = parts.link("a", room=1)
    assert parts.placer.is_patient
    plain = parts.scheduler.add(a_batch(2, batch_id="plain"))
    await turn()
    assert not parts.placer.is_patient
    parts.events.responded(link, tokens(1, 5))
    parts.events.responded(link, finished(1))
    await turn()
    assert parts.placer.is_patient
    calling = parts.scheduler.add(
        a_batch(0, batch_id="calling", tools=CallRules(frozenset([9]), frozenset(), 4, 60.0))
    )
    assert not parts.placer.is_patient
    parts.scheduler.drop(calling)
    assert parts.placer.is_patient
    parts.scheduler.drop(plain)


@pytest.mark.parametrize(
    ("instances", "patient", "seconds"),
    [(2, False, 0.002), (2, True, 0.1), (400, True, 0.4), (2000, False, 1.0)],
)
def test_reports_follow_each_other_faster_where_somebody_waits(
    instances: int, patient: bool, seconds: float
) -> None:
    assert report_interval(instances, patient=patient) == seconds


# Lost instances ----------------------------------------------------------------------------------------


async def test_a_lost_instance_s_samples_are_resumed_from_their_tokens_less_the_last() -> None:
    parts = SchedulerParts()
    lost = parts.link("a")
    running = parts.scheduler.add(a_batch(1))
    await turn()
    parts.events.responded(lost, tokens(lost.items[0].handle, 5, 6, 7))
    other = parts.link("b")
    parts.events.link_lost(lost, "stream broken")
    await turn()
    (item,) = other.items
    assert list(item.prefix_token_ids) == [5, 6]
    assert (item.seed, item.slot) == (100, 0)
    assert (running.batch.samples[0].attempt, running.batch.samples[0].resubmissions) == (2, 1)
    assert parts.metric("resubmissions_total", cause="lost") == 1
    assert parts.metric("running_samples", instance_id="a") == 0
    parts.events.responded(other, tokens(item.handle, 7, 8))
    assert texts(running) == [[5, 6, 7, 8]]


async def test_late_events_of_an_old_attempt_change_nothing() -> None:
    parts = SchedulerParts()
    lost = parts.link("a")
    running = parts.scheduler.add(a_batch(1))
    await turn()
    handle = lost.items[0].handle
    attempt = lost.held[handle]
    parts.events.responded(lost, tokens(handle, 5, 6))
    parts.events.link_lost(lost, "stream broken")
    other = parts.link("b")
    await turn()
    # Once as a message of a link that holds nothing any more, and once as if the link still held the attempt.
    for held in ({}, {handle: attempt}):
        lost.held = dict(held)
        parts.events.responded(lost, tokens(handle, 99))
        parts.events.responded(lost, refused(handle, code_pb2.UNAVAILABLE))
        lost.held = dict(held)
        parts.events.responded(lost, finished(handle))
    sample = running.batch.samples[0]
    assert (texts(running), sample.phase, sample.instance_id) == ([[5]], SamplePhase.ASSIGNED, "b")
    assert list(other.held) == [other.items[0].handle]
    assert running.batch.endings == []


async def test_a_sample_that_gains_nothing_fails_after_so_many_attempts() -> None:
    parts = SchedulerParts()
    running = parts.scheduler.add(a_batch(1, max_attempts=2))
    for name in ("a", "b"):
        link = parts.link(name)
        await turn()
        parts.events.link_lost(link, "gone")
    (ending,) = running.batch.endings
    assert (ending.status, "2 attempts in a row" in ending.error) == (SAMPLE_FAILED, True)
    assert (parts.batches.unfinished, parts.metric("samples_total", status="failed")) == (0, 1)


async def test_a_message_whose_lengths_do_not_match_is_an_error_of_the_link() -> None:
    parts = SchedulerParts()
    link = parts.link("a")
    running = parts.scheduler.add(a_batch(1))
    await turn()
    broken = tokens(link.items[0].handle, 5, 6)
    broken.deltas[0].tokens.logprobs.pop()
    with pytest.raises(ValueError, match="2 tokens with 1 logprobs"):
        parts.events.responded(link, broken)
    assert texts(running) == [[]]


# Refusals ----------------------------------------------------------------------------------------------


async def test_a_refused_sample_goes_elsewhere_and_the_instance_is_left_alone() -> None:
    parts = SchedulerParts()
    full = parts.link("a", room=1)
    running = parts.scheduler.add(a_batch(1))
    await turn()
    other = parts.link("b", room=1)
    parts.events.responded(full, refused(full.items[0].handle, code_pb2.RESOURCE_EXHAUSTED))
    await turn()
    assert [item.slot for item in other.items] == [0]
    assert (len(full.items), full.slots.room) == (1, 1)
    assert running.batch.samples[0].resubmissions == 0
    assert parts.metric("refusals_total", instance_id="a", code="RESOURCE_EXHAUSTED") == 1
    assert parts.metric("resubmissions_total", cause="lost") == 0


async def test_a_sample_that_was_refused_too_often_says_why() -> None:
    parts = SchedulerParts(refusal_pause=0.01)
    link = parts.link("a")
    running = parts.scheduler.add(a_batch(1, max_attempts=1))
    await turn()
    parts.events.responded(
        link, refused(link.items[0].handle, code_pb2.INTERNAL, message="the device is gone")
    )
    (ending,) = running.batch.endings
    assert ending.failure is not None
    assert (ending.failure.code, ending.failure.field) == (code_pb2.UNAVAILABLE, "")
    assert ending.error == "1 attempts in a row brought no token; the last was on a: the device is gone"


async def test_an_instance_that_refused_is_tried_again_after_the_pause() -> None:
    parts = SchedulerParts(refusal_pause=0.01)
    link = parts.link("a")
    running = parts.scheduler.add(a_batch(1))
    await turn()
    parts.events.responded(link, refused(link.items[0].handle, code_pb2.UNAVAILABLE))
    assert link.closed_until > 0.0
    await parts.until(lambda: running.batch.samples[0].attempt == 2)
    assert len(link.items) == 2
    parts.events.responded(link, tokens(link.items[1].handle, 5))
    assert link.refusals.failures == 0


@pytest.mark.parametrize("code", [code_pb2.INVALID_ARGUMENT, code_pb2.DATA_LOSS])
async def test_a_final_refusal_fails_the_sample_with_the_field_and_is_not_tried_elsewhere(code: int) -> None:
    parts = SchedulerParts()
    link = parts.link("a")
    running = parts.scheduler.add(a_batch(1))
    await turn()
    response = refused(link.items[0].handle, code, "sampling.json_schema", "a dead end")
    parts.events.responded(link, response)
    await turn()
    (ending,) = running.batch.endings
    assert ending.status == SAMPLE_FAILED
    # As it is written to the journal, and told.
    told = sample_pb2.Sample.FromString(final_sample(running.batch, ending).SerializeToString())
    failure = told.failure
    assert (failure.code, failure.field) == (code, "sampling.json_schema")
    assert failure.reason == "a dead end"
    assert told.error == "sampling.json_schema: a dead end"
    assert len(link.items) == 1
    assert not parts.placer.is_paused(link)


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("reason", ["INSTANCE_CLOSED", "STALE_VERSION", ""])
async def test_an_instance_that_takes_nothing_now_costs_a_sample_none_of_its_tokens(
    reason: str, private: bool
) -> None:
    parts = SchedulerParts()
    running = parts.scheduler.add(a_batch(1), private=private)
    lost = parts.link("a")
    await turn()
    parts.events.responded(lost, tokens(lost.items[0].handle, 5, 6, 7))
    parts.events.link_lost(lost, "stream broken")
    closed = parts.link("b")
    await turn()
    response = refused(closed.items[0].handle, code_pb2.FAILED_PRECONDITION, reason=reason)
    parts.events.responded(closed, response)
    other = parts.link("c")
    await turn()
    assert list(other.items[0].prefix_token_ids) == [5, 6]
    assert running.batch.endings == []


def resume_refused(handle: int) -> pb.WorkResponse:
    """Return the refusal of an instance whose model does not go on from the tokens of a sample."""
    return refused(handle, code_pb2.FAILED_PRECONDITION, message="latent KV", reason=RESUMING)


async def test_a_sample_that_no_instance_goes_on_with_begins_again() -> None:
    parts = SchedulerParts()
    running = parts.scheduler.add(a_batch(1))
    lost = parts.link("a")
    await turn()
    parts.events.responded(lost, tokens(lost.items[0].handle, 5, 6, 7))
    parts.events.link_lost(lost, "stream broken")
    other = parts.link("b")
    await turn()
    assert list(other.items[0].prefix_token_ids) == [5, 6]
    parts.events.responded(other, resume_refused(other.items[0].handle))
    await turn()
    again = other.items[1]
    assert (list(again.prefix_token_ids), again.seed, again.slot) == ([], 100, 0)
    assert not parts.placer.is_paused(other)
    parts.events.responded(other, tokens(again.handle, 8, 9))
    assert texts(running) == [[8, 9]]


@pytest.mark.parametrize("why", ["streamed", "given", "lost too often"])
async def test_a_sample_that_cannot_begin_again_says_why(why: str) -> None:
    parts = SchedulerParts()
    batch = a_batch(1, max_attempts=1 if why == "lost too often" else 3)
    if why == "given":
        batch.groups[0] = replace(batch.groups[0], prefix=[3])
    running = parts.scheduler.add(batch, private=why == "streamed")
    other = parts.link("b")
    await turn()
    if why == "lost too often":
        running.batch.samples[0].resubmissions = 1
    parts.events.responded(other, resume_refused(other.items[0].handle))
    (ending,) = running.batch.endings
    assert ending.failure is not None
    assert (ending.status, ending.failure.code) == (SAMPLE_FAILED, code_pb2.FAILED_PRECONDITION)
    assert ending.error == "latent KV"


# Cancellation and deadlines ----------------------------------------------------------------------------


async def test_a_waiting_sample_is_cancelled_at_once_and_a_running_one_when_its_instance_answers() -> None:
    parts = SchedulerParts()
    link = parts.link("a", room=1)
    running = parts.scheduler.add(a_batch(2))
    await turn()
    handle = link.items[0].handle
    parts.events.responded(link, tokens(handle, 5))
    assert await parts.scheduler.cancel(running, [0, 1], keep_partial=True) == 2
    assert [ending.index for ending in running.batch.endings] == [1]
    assert link.aborted == [handle]
    parts.events.responded(link, tokens(handle, 6))
    parts.events.responded(link, finished(handle, ABORTED))
    assert [ending.status for ending in running.batch.endings] == [SAMPLE_ABORTED] * 2
    assert texts(running) == [[5, 6], []]
    assert await parts.scheduler.cancel(running, [0, 1], keep_partial=True) == 0


async def test_an_unanswered_abort_ends_the_sample_all_the_same() -> None:
    parts = SchedulerParts(abort_seconds=0.01)
    link = parts.link("a")
    running = parts.scheduler.add(a_batch(1))
    await turn()
    parts.events.responded(link, tokens(link.items[0].handle, 5))
    await parts.scheduler.cancel(running, [0], keep_partial=False)
    await parts.until(lambda: bool(running.batch.endings))
    assert (texts(running), parts.batches.unfinished) == ([[]], 0)
    # The answer that comes too late is of no effect.
    parts.events.responded(link, finished(link.items[0].handle, ABORTED))
    assert len(running.batch.endings) == 1


async def test_the_deadline_ends_what_is_left_with_the_tokens_so_far() -> None:
    parts = SchedulerParts(abort_seconds=0.01)
    link = parts.link("a", room=1)
    running = parts.scheduler.add(a_batch(2, seconds=0.05))
    await turn()
    parts.events.responded(link, tokens(link.items[0].handle, 5))
    await parts.until(lambda: len(running.batch.endings) == 2)
    assert {ending.status for ending in running.batch.endings} == {SAMPLE_ABORTED}
    assert texts(running) == [[5], []]
    assert parts.metric("expired_samples_total") == 2


async def test_a_dropped_batch_leaves_nothing_behind() -> None:
    parts = SchedulerParts()
    link = parts.link("a", room=1)
    running = parts.scheduler.add(a_batch(2))
    await turn()
    changed = running.changed.next_change()
    parts.scheduler.drop(running)
    assert (parts.batches.unfinished, parts.batches.by_key, running.dropped) == (0, {}, True)
    assert (link.aborted, parts.metric("queued_samples")) == ([link.items[0].handle], 0)
    assert changed.is_set()
    parts.events.responded(link, tokens(link.items[0].handle, 5))
    parts.events.responded(link, finished(link.items[0].handle))
    await turn()
    assert (len(link.items), link.slots.room, parts.batches.unfinished) == (1, 1, 0)


# The journal -------------------------------------------------------------------------------------------


async def test_tokens_go_to_the_journal_and_the_last_finished_sample_ends_the_batch() -> None:
    parts = SchedulerParts()
    link = parts.link("a")
    running = parts.scheduler.add(a_batch(2))
    await turn()
    first, second = (item.handle for item in link.items)
    parts.events.responded(link, tokens(first, 5, 0))
    (write,) = parts.journal.write(parts.scheduler)
    assert [(part.index, part.begin, part.end) for part in write.extensions] == [(0, 0, 1)]
    parts.events.responded(link, finished(first))
    parts.journal.write(parts.scheduler)
    assert (running.events, running.batch.key in parts.batches.by_key) == (1, True)
    parts.events.responded(link, tokens(second, 0))
    parts.events.responded(link, finished(second))
    changed = running.changed.next_change()
    assert parts.batches.finished.empty()
    parts.journal.write(parts.scheduler)
    assert parts.batches.finished.get_nowait() == ("run", "b")
    assert (parts.batches.by_key, changed.is_set()) == ({}, True)


async def test_a_recovered_batch_goes_on_from_the_journaled_tokens() -> None:
    parts = SchedulerParts()
    batch = a_batch(3)
    batch.mark_ended(0)
    batch.restore(1, sample_pb2.Sample(tokens=columns([5, 6], [-1.0] * 2, batch.policy_version)), 1)
    batch.cancel(2, keep_partial=True)
    link = parts.link("a")
    running = parts.scheduler.add(batch, events=1)
    await turn()
    assert [(item.slot, list(item.prefix_token_ids)) for item in link.items] == [(1, [5, 6])]
    assert [(ending.index, ending.status) for ending in batch.endings] == [(2, SAMPLE_ABORTED)]
    assert (running.events, parts.batches.unfinished) == (1, 1)
    # Its next chunk follows those that are there.
    parts.events.responded(link, tokens(link.items[0].handle, 7, 8))
    (write,) = parts.journal.write(parts.scheduler)
    assert [(chunk.number, chunk.begin, chunk.end) for chunk in write.extensions] == [(1, 2, 3)]


async def test_a_batch_that_a_successor_has_is_dropped_and_wakes_its_readers() -> None:
    parts = SchedulerParts()
    link = parts.link("a")
    running = parts.scheduler.add(a_batch(1))
    await turn()
    changed = running.changed.next_change()
    parts.scheduler.taken(running.batch.key)
    assert (running.dropped, changed.is_set(), parts.batches.unfinished) == (True, True, 0)
    assert link.aborted == [link.items[0].handle]


async def test_a_sample_that_the_journal_has_lost_is_generated_again_from_its_seed() -> None:
    parts = SchedulerParts()
    link = parts.link("a")
    running = parts.scheduler.add(a_batch(2))
    await turn()
    first = link.items[0]
    parts.events.responded(link, tokens(first.handle, 5, 0))
    parts.events.responded(link, finished(first.handle))
    parts.journal.write(parts.scheduler)
    parts.scheduler.reopen(running.batch.key, [0])
    await turn()
    again = link.items[-1]
    assert (again.seed, list(again.prefix_token_ids)) == (first.seed, [])
    assert (parts.batches.unfinished, parts.metric("resubmissions_total", cause="journal")) == (2, 1)
    # What the first attempt still has to say is ignored.
    parts.events.responded(link, tokens(first.handle, 9))
    parts.events.responded(link, tokens(again.handle, 5, 0))
    assert texts(running)[0] == [5, 0]


async def test_a_cancelled_sample_that_the_journal_has_lost_ends_at_once() -> None:
    parts = SchedulerParts()
    running = parts.scheduler.add(a_batch(1))
    parts.scheduler.cancel(running, [0], keep_partial=True)
    parts.batches.by_key[running.batch.key].batch.endings.clear()
    parts.scheduler.reopen(running.batch.key, [0])
    assert [(ending.index, ending.status) for ending in running.batch.endings] == [(0, SAMPLE_ABORTED)]
    assert parts.batches.unfinished == 0


async def test_a_private_batch_wakes_its_reader_and_is_not_journaled() -> None:
    parts = SchedulerParts()
    link = parts.link("a")
    running = parts.scheduler.add(a_batch(1), private=True)
    await turn()
    changed = running.changed.next_change()
    parts.events.responded(link, tokens(link.items[0].handle, 5))
    assert (changed.is_set(), parts.journal.touched) == (True, {})


async def test_a_step_is_over_with_its_last_sample_and_shows_the_idle_time_of_its_instances() -> None:
    parts = SchedulerParts()
    one, two = parts.link("a", room=1), parts.link("b", room=1)
    parts.scheduler.add(a_batch(2), coverage={("p", 0): DraftCoverage(4)})
    await turn()
    for link in (one, two):
        assert parts.metric("step_seconds_count") == 0
        parts.events.responded(link, tokens(link.items[0].handle, 5, 0))
        parts.events.responded(link, finished(link.items[0].handle))
    assert parts.metric("step_seconds_count") == 1
    assert parts.metric("bubble_seconds_count") == 2
    # The draft of one of the two is longer than the sample.
    assert parts.metric("step_coverage_ratio") == 0.5


async def test_instances_that_come_or_go_after_a_step_of_single_samples_change_nothing_about_it() -> None:
    parts = SchedulerParts()
    link, idle = parts.link("a"), parts.link("b", room=0)
    running = parts.scheduler.add(a_batch(1, batch_id="generate/1"), private=True)
    await turn()
    parts.events.responded(link, tokens(link.items[0].handle, 5))
    parts.events.responded(link, finished(link.items[0].handle))
    parts.scheduler.drop(running)
    parts.link("late")
    parts.events.link_lost(idle, "gone")
    parts.scheduler.weights_updated("run", 0.0, 0.0)
    (record,) = parts.recorded
    assert [row[0] for row in record.details["rows"]] == ["a", "b"]


async def test_a_sample_with_a_prefix_begins_no_step() -> None:
    parts = SchedulerParts()
    for prefix, counts in (([5], False), ([], True), ([5], True)):
        batch = a_batch(1, batch_id=f"generate/{len(parts.batches.by_key)}")
        batch.groups[0] = replace(batch.groups[0], prefix=prefix)
        assert parts.scheduler.add(batch, private=True).in_step is counts


async def test_a_caller_of_a_single_sample_that_leaves_takes_no_report_of_a_batch_with_it() -> None:
    parts = SchedulerParts()
    link = parts.link("a")
    leaving = parts.scheduler.add(a_batch(1, batch_id="generate/1"), private=True)
    await turn()
    parts.scheduler.add(a_batch(1))
    await turn()
    parts.events.responded(link, tokens(link.items[1].handle, 5))
    parts.events.responded(link, finished(link.items[1].handle))
    parts.journal.write(parts.scheduler)
    assert parts.recorded == []
    parts.scheduler.drop(leaving)
    assert [(each.kind, each.details["samples"]) for each in parts.recorded] == [("step", 1)]


async def test_a_batch_and_the_end_of_the_run_end_a_step_of_single_samples() -> None:
    parts = SchedulerParts()
    link = parts.link("a")

    async def generate(step: int) -> None:
        running = parts.scheduler.add(a_batch(1, batch_id=f"generate/{step}", step=step), private=True)
        await turn()
        parts.events.responded(link, finished(link.items[-1].handle))
        parts.scheduler.drop(running)

    await generate(1)
    parts.scheduler.add(a_batch(1, step=2))
    assert [each.details["step"] for each in parts.recorded] == [1]
    await turn()
    parts.events.responded(link, finished(link.items[-1].handle))
    await generate(2)
    parts.scheduler.forget_run("run")
    assert [each.details["step"] for each in parts.recorded] == [1, 2]
    # Another run of the same name.
    await generate(0)
    parts.scheduler.forget_run("run")
    assert [each.details["step"] for each in parts.recorded] == [1, 2, 0]


# Moves -------------------------------------------------------------------------------------------------


async def test_a_sample_moved_by_kv_is_claimed_and_only_the_receiver_s_tokens_count() -> None:
    parts = SchedulerParts()
    donor = parts.link("a", room=1)
    running = parts.scheduler.add(a_batch(1))
    await turn()
    handle = donor.items[0].handle
    parts.events.responded(donor, tokens(handle, 5, 6))
    receiver = parts.link("b")
    parts.events.responded(donor, moved(handle, "b", 2))
    ((claim, migration_id),) = receiver.claimed.items()
    assert (migration_id, donor.slots.room, receiver.slots.room) == ("m1", 1, 7)
    parts.events.responded(donor, tokens(handle, 99))
    parts.events.responded(receiver, tokens(claim, 7))
    assert (texts(running), running.batch.samples[0].attempt) == ([[5, 6, 7]], 2)
    assert parts.metric("moves_total", outcome="claimed") == 1
    assert receiver.items == []


async def test_a_moved_sample_waits_for_the_link_to_its_receiver() -> None:
    parts = SchedulerParts()
    donor = parts.link("a")
    running = parts.scheduler.add(a_batch(1))
    await turn()
    parts.events.responded(donor, tokens(donor.items[0].handle, 5))
    parts.events.responded(donor, moved(donor.items[0].handle, "b", 1))
    await turn()
    assert (len(parts.events.transit), len(donor.items)) == (1, 1)
    receiver = parts.link("b")
    assert (len(parts.events.transit), len(receiver.claimed)) == (0, 1)
    assert running.batch.samples[0].instance_id == "b"


async def test_a_moved_sample_whose_receiver_never_comes_is_resumed_by_its_prefix() -> None:
    parts = SchedulerParts(claim_wait=0.01)
    donor = parts.link("a")
    running = parts.scheduler.add(a_batch(1))
    await turn()
    parts.events.responded(donor, tokens(donor.items[0].handle, 5, 6))
    parts.events.responded(donor, moved(donor.items[0].handle, "nowhere", 2))
    await parts.until(lambda: running.batch.samples[0].attempt == 3)
    assert list(donor.items[1].prefix_token_ids) == [5, 6]
    assert parts.metric("resubmissions_total", cause="no_link") == 1


async def test_a_refused_claim_is_resumed_by_its_prefix_and_does_not_close_the_instance() -> None:
    parts = SchedulerParts()
    donor = parts.link("a", room=1)
    parts.scheduler.add(a_batch(1))
    await turn()
    parts.events.responded(donor, tokens(donor.items[0].handle, 5, 6))
    receiver = parts.link("b")
    parts.events.responded(donor, moved(donor.items[0].handle, "b", 2))
    (claim,) = receiver.claimed
    parts.events.responded(receiver, refused(claim, code_pb2.NOT_FOUND))
    await turn()
    items = donor.items[1:] + receiver.items
    assert [list(item.prefix_token_ids) for item in items] == [[5, 6]]
    assert not parts.placer.is_paused(receiver)
    assert parts.metric("moves_total", outcome="refused") == 1


async def test_a_move_with_missing_tokens_is_ended_there_and_resumed_from_what_is_known() -> None:
    parts = SchedulerParts()
    donor = parts.link("a", room=1)
    running = parts.scheduler.add(a_batch(1))
    await turn()
    parts.events.responded(donor, tokens(donor.items[0].handle, 5, 6))
    receiver = parts.link("b", room=1)
    parts.events.responded(donor, moved(donor.items[0].handle, "b", 4))
    await turn()
    assert receiver.aborted == list(receiver.claimed)
    assert list(donor.items[1].prefix_token_ids) == [5]
    assert texts(running) == [[5]]
    assert parts.metric("moves_total", outcome="tokens_missing") == 1


async def test_a_sample_cancelled_on_its_way_is_claimed_to_be_aborted() -> None:
    parts = SchedulerParts()
    donor = parts.link("a")
    running = parts.scheduler.add(a_batch(1))
    await turn()
    parts.events.responded(donor, tokens(donor.items[0].handle, 5))
    parts.events.responded(donor, moved(donor.items[0].handle, "b", 1))
    await parts.scheduler.cancel(running, [0], keep_partial=True)
    assert [ending.status for ending in running.batch.endings] == [SAMPLE_ABORTED]
    receiver = parts.link("b")
    assert receiver.aborted == list(receiver.claimed)
    assert parts.metric("moves_total", outcome="unwanted") == 1


@pytest.mark.parametrize("room", [1, 0])
async def test_a_sample_moved_by_prefix_prefers_its_receiver_but_goes_anywhere(room: int) -> None:
    parts = SchedulerParts()
    donor = parts.link("a")
    running = parts.scheduler.add(a_batch(1))
    await turn()
    parts.events.responded(donor, tokens(donor.items[0].handle, 5, 6))
    receiver = parts.link("b", room=room)
    parts.events.responded(donor, finished(donor.items[0].handle, ABORTED, resume_on="b"))
    await turn()
    chosen = receiver if room else donor
    assert list(chosen.items[-1].prefix_token_ids) == [5]
    assert running.batch.samples[0].instance_id == chosen.instance_id
    assert parts.metric("moves_total", outcome="by_prefix" if room else "no_place") == 1
    assert parts.metric("resubmissions_total", cause="moved") == 1
