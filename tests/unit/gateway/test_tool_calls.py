"""Tool calls: a sample waits, goes on with what its environment says, and its text is journaled as it grew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from paceline import convert
from paceline.internal.v1 import generation_pb2
from paceline.times import duration
from paceline.v1 import rollout_pb2, sample_pb2
from services.contracts.errors import AlreadyExists, FailedPrecondition
from services.contracts.sampling import ModelLimits
from services.gateway.api.validation import check_groups, check_submit
from services.gateway.journal.chunks import Head, PartialSample
from services.gateway.journal.record import collect, settle, undo
from services.gateway.scheduler.placement import InstancePool, InstanceSlots, WaitingQueue, WaitingSample
from services.gateway.state.calls import (
    CallAnswer,
    CallRules,
    WaitingCalls,
    check_continuation,
    effect_of_continuation,
    sample_call,
    with_calls,
)
from services.gateway.state.messages import BatchBuilder, work_item
from services.gateway.state.rollout_batch import RolloutBatch
from services.gateway.state.sample import EventEffect, SamplePhase
from tests.support.token_columns import columns
from tests.unit.gateway.scheduler_parts import a_batch, record_of

CALL, END = 9, 2
LIMITS = ModelLimits(vocab_size=64, max_model_len=60, has_text=True, end_tokens=(END,))
STOPPED = generation_pb2.Finished(finish_reason=sample_pb2.FINISH_REASON_STOP, cached_context_tokens=3)


def calling_batch(most: int = 100, samples: int = 1) -> RolloutBatch:
    return a_batch(samples, tools=CallRules(frozenset({CALL}), frozenset({"</call>"}), most, 60.0))


def speak(batch: RolloutBatch, *tokens: int, stop_string: str = "") -> EventEffect:
    """Let the first sample get these tokens on an instance, and stop."""
    attempt = batch.assign(0, "i0", 1.0)
    batch.extend(0, attempt, columns(tokens, [-1.0] * len(tokens)), 2.0)
    report = generation_pb2.Finished()
    report.CopyFrom(STOPPED)
    report.stop_string = stop_string
    return batch.finish(0, attempt, report, 3.0)


def a_request(**tools: Any) -> rollout_pb2.SubmitRolloutsRequest:
    request = rollout_pb2.SubmitRolloutsRequest(run_id="run", batch_id="b", run_seed=1)
    request.groups.add(prompt_id="p", prompt_token_ids=[1], samples=1)
    request.tools.CopyFrom(sample_pb2.ToolUse(**tools))
    return request


def fields_of(request: rollout_pb2.SubmitRolloutsRequest) -> list[str]:
    return [each.field for each in check_submit(request, LIMITS, most_calls=10)]


def test_a_call_waits_and_what_the_environment_says_is_part_of_the_response() -> None:
    batch = calling_batch()
    assert speak(batch, 5, CALL) is EventEffect.CALLING
    sample = batch.samples[0]
    assert (sample.phase, sample.settled, batch.ended) == (SamplePhase.CALLING, 2, 0)
    call = sample_call(sample, batch.group_of(0))
    assert (call.number, call.begin, list(call.tokens.token_ids)) == (1, 0, [5, CALL])
    batch.answer(0, [7, END])
    assert (sample.phase, sample.settled, sample.ends_with_environment) == (SamplePhase.WAITING, 4, True)
    item = work_item(batch, sample, handle=1)
    assert (list(item.prefix_token_ids), item.environment_last) == ([5, CALL, 7, END], True)
    assert speak(batch, 6, 8, stop_string="</call>") is EventEffect.CALLING
    assert not work_item(batch, sample, handle=1).environment_last
    assert list(sample_call(sample, batch.group_of(0)).tokens.token_ids) == [6, 8]
    whole = sample_call(sample, batch.group_of(0), whole=True)
    assert list(whole.tokens.token_ids) == [5, CALL, 7, END, 6, 8]
    assert [(span.begin, span.end) for span in whole.environment_spans] == [(2, 4)]
    batch.answer(0, [7])
    assert speak(batch, END) is EventEffect.ENDED
    assert list(sample.columns.logprobs) == [-1, -1, 0, 0, -1, -1, 0, -1]
    assert (sample.calls, sample.environment) == ([2, 6], [(2, 4), (6, 7)])
    assert [span.cached_context for span in sample.spans] == [3, 3, 3]


def test_a_lost_turn_begins_again_behind_what_the_environment_said() -> None:
    batch = calling_batch()
    speak(batch, 5, CALL)
    batch.answer(0, [7])
    attempt = batch.assign(0, "i1", 4.0)
    batch.lost(0, attempt, 5.0)
    assert list(batch.samples[0].tokens) == [5, CALL, 7]
    attempt = batch.assign(0, "i1", 4.0)
    batch.extend(0, attempt, columns([6], [-1.0]), 5.0)
    batch.lost(0, attempt, 5.0)
    assert list(batch.samples[0].tokens) == [5, CALL, 7]
    assert work_item(batch, batch.samples[0], 1).environment_last


def test_the_call_that_is_one_too_many_ends_the_sample() -> None:
    batch = calling_batch(most=1)
    assert speak(batch, CALL) is EventEffect.CALLING
    batch.answer(0, [7])
    assert speak(batch, CALL) is EventEffect.ENDED
    assert batch.endings[0].finish_reason == sample_pb2.FINISH_REASON_LENGTH
    assert batch.endings[0].status == sample_pb2.SAMPLE_STATUS_TRUNCATED


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (sample_pb2.FINISH_REASON_STOP, sample_pb2.SAMPLE_STATUS_COMPLETED),
        (sample_pb2.FINISH_REASON_ABANDONED, sample_pb2.SAMPLE_STATUS_ABORTED),
    ],
)
def test_a_calling_sample_may_end_as_it_is(
    reason: sample_pb2.FinishReason, status: sample_pb2.SampleStatus
) -> None:
    batch = calling_batch()
    speak(batch, 5, CALL)
    assert batch.end_call(0, reason, 9.0) is EventEffect.ENDED
    assert (batch.endings[0].finish_reason, batch.endings[0].status) == (reason, status)
    assert list(batch.samples[0].tokens) == [5, CALL]


def test_a_calling_sample_can_be_cancelled() -> None:
    batch = calling_batch()
    speak(batch, 5, CALL)
    assert batch.cancel(0, keep_partial=True) is SamplePhase.CALLING
    assert batch.abort(0, 9.0) is EventEffect.ENDED


def test_the_likeliest_tokens_of_the_environments_positions_are_its_own() -> None:
    batch = calling_batch()
    batch.group_of(0).sampling.top_logprobs = 2
    attempt, sample = batch.assign(0, "i0", 1.0), batch.samples[0]
    new = columns([CALL], [-1.0], top_token_ids=[CALL, 4], top_logprobs=[-1.0, -2.0])
    batch.extend(0, attempt, new, 1.5)
    batch.finish(0, attempt, STOPPED, 2.0)
    batch.answer(0, [7])
    assert list(sample.columns.top_token_ids) == [CALL, 4, 7, 0]
    assert list(sample.columns.top_logprobs) == [-1, -2, 0, -float("inf")]


# What is journaled --------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    turns=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=5),
    written=st.lists(st.booleans(), min_size=20, max_size=20),
    torn=st.sets(st.integers(0, 19)),
    restarts=st.sets(st.integers(0, 4)),
)
def test_chunks_and_rest_are_the_sample_however_they_were_cut(
    turns: list[tuple[int, int]], written: list[bool], torn: set[int], restarts: set[int]
) -> None:
    batch = calling_batch()
    record, chunks, step = record_of(batch), list[bytes](), iter(range(100))
    expected, environment, calls = list[int](), list[tuple[int, int]](), list[int]()

    def write() -> None:
        number = next(step)
        if not written[number % 20]:
            return
        write = collect(batch, record)
        for chunk in write.extensions:
            chunks[chunk.number :] = [chunk.payload]
        if write.extensions and number in torn:
            chunks.clear()
            settle(batch, record, write, [0])
        else:
            settle(batch, record, write, [])

    for turn, (said, answered) in enumerate(turns):
        attempt = batch.assign(0, "i0", 1.0)
        for token in range(said):
            last = token == said - 1
            batch.extend(0, attempt, columns([CALL if last else 10 + token], [-0.5]), 2.0)
            write()
        expected += [*range(10, 9 + said), CALL]
        batch.finish(0, attempt, STOPPED, 3.0)
        calls.append(len(expected))
        write()
        if turn in restarts and chunks and batch.samples[0].journaled == len(expected):
            batch = calling_batch()
            partial = PartialSample(0, Head(len(chunks), len(expected)), b"".join(chunks)).parse()
            assert partial is not None
            batch.restore(0, partial, len(chunks))
            assert batch.samples[0].phase is SamplePhase.CALLING
        batch.answer(0, list(range(30, 30 + answered)))
        environment.append((len(expected), len(expected) + answered))
        expected += range(30, 30 + answered)
        write()
    speak(batch, END)
    last_write = collect(batch, record)
    (ended,) = last_write.ended
    told = sample_pb2.Sample.FromString(b"".join(chunks[: ended.head.chunks]) + ended.rest)
    assert list(told.tokens.token_ids) == [*expected, END]
    assert [(span.begin, span.end) for span in told.environment_spans] == environment
    assert list(told.calls) == calls
    assert [(span.begin, span.end) for span in convert.sample(told).version_spans] == [(0, len(expected) + 1)]
    own = sample_pb2.Sample.FromString(ended.payload)
    for each in (told, own):
        del each.tokens.versions[:]
    assert told == own


def test_an_answer_is_written_at_once_though_the_sample_has_gained_tokens_since() -> None:
    batch = calling_batch()
    record, sample = record_of(batch), batch.samples[0]

    def written(least_tokens: int = 1000) -> list[tuple[int, int]]:
        write = collect(batch, record, least_tokens)
        settle(batch, record, write, [])
        return [(chunk.begin, chunk.end) for chunk in write.extensions]

    speak(batch, 5, CALL)
    assert written() == [(0, 2)]
    batch.answer(0, [7, 7])
    attempt = batch.assign(0, "i0", 4.0)
    batch.extend(0, attempt, columns([6, 6, 6], [-1.0] * 3), 5.0)
    # Redis loses this write.
    undo(batch, collect(batch, record, 1000))
    assert sample.journaled == 2
    assert written() == [(2, 6)]
    batch.extend(0, attempt, columns([6, 6], [-1.0] * 2), 6.0)
    assert written() == [], "nobody waits for these tokens"
    batch.extend(0, attempt, columns([6], [-1.0]), 7.0)
    assert written(3) == [(6, 9)]


# Answers ------------------------------------------------------------------------------------------------


def continuation(position: int, *tokens: int, end: bool = False) -> rollout_pb2.Continuation:
    return rollout_pb2.Continuation(prompt_id="p", position=position, token_ids=tokens, end=end)


def test_an_answer_is_taken_once_and_its_repetition_is_passed_over() -> None:
    batch = calling_batch()
    sample = batch.samples[0]
    with pytest.raises(FailedPrecondition, match="waits for none"):
        effect_of_continuation(sample, continuation(2, 7), "c")
    speak(batch, 5, CALL)
    with pytest.raises(FailedPrecondition, match="waits at position 2"):
        effect_of_continuation(sample, continuation(1, 7), "c")
    assert effect_of_continuation(sample, continuation(2, 7), "c") is CallAnswer.RESUME
    assert effect_of_continuation(sample, continuation(2, end=True), "c") is CallAnswer.END
    batch.answer(0, [7])
    assert effect_of_continuation(sample, continuation(2, 7), "c") is CallAnswer.SKIP
    for other in (continuation(2, 8), continuation(2, 7, 7), continuation(2, end=True)):
        with pytest.raises(AlreadyExists):
            effect_of_continuation(sample, other, "c")
    speak(batch, END)
    assert effect_of_continuation(sample, continuation(2, 7), "c") is CallAnswer.SKIP


@pytest.mark.parametrize(
    ("given", "limit", "fault"),
    [
        (continuation(2, 7), None, ""),
        (continuation(2), None, "is empty"),
        (continuation(2, 64), None, "must be in [0, 64)"),
        (continuation(2, 7, end=True), None, "there are none with `end`"),
        (continuation(2, end=True), None, ""),
        (continuation(2, *[7] * 7), 10, ""),
        (continuation(2, *[7] * 8), 10, "room for 7"),
        (continuation(50, *[7] * 7), None, ""),
        (continuation(50, *[7] * 8), None, "room for 7"),
    ],
)
def test_what_the_environment_says_must_leave_room_for_a_token(
    given: rollout_pb2.Continuation, limit: int | None, fault: str
) -> None:
    batch = calling_batch()
    group = batch.group_of(0)
    group.sampling.ClearField("max_tokens")
    if limit is not None:
        group.sampling.max_tokens = limit
    found = check_continuation(given, group, LIMITS, "continuations[0]")
    assert [fault in each.description for each in found] == [True] * bool(fault)
    assert all(each.field.startswith("continuations[0].token_ids") for each in found)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6))))
def test_calls_are_told_in_order_and_each_once(changes: list[tuple[bool, int]]) -> None:
    calls, model, told, seen = WaitingCalls(), list[int](), list[int](), 0
    for now, (adds, index) in enumerate(changes):
        if adds:
            calls.add(index, float(now))
            model += [index] * (index not in model)
        else:
            calls.discard(index)
            model = [each for each in model if each != index]
        assert [index for _, index in calls.after(0)] == model
        fresh = calls.after(seen)
        told += [index for _, index in fresh]
        seen = max([seen, *(number for number, _ in fresh)])
        assert calls.after(seen) == []
    assert set(model) <= set(told)
    assert len(calls) == len(model)
    assert calls.overdue(1e9) == model
    assert calls.overdue(-1.0) == []


# Requests -----------------------------------------------------------------------------------------------


def test_samples_stop_at_calls_on_their_instance_and_at_nothing_else_than_before() -> None:
    request = a_request(call_token_ids=[CALL], call_strings=["</call>"], max_wait=duration(3.0))
    request.sampling.stop.append("x")
    request.groups.add(prompt_id="q", prompt_token_ids=[1], samples=1)
    request.groups[1].sampling.stop_token_ids.append(4)
    batch = BatchBuilder(100.0, 3, max_calls=7).from_submission(request, 0.0)
    assert [list(group.sampling.stop) for group in batch.groups] == [["x", "</call>"], ["</call>"]]
    assert [list(group.sampling.stop_token_ids) for group in batch.groups] == [[CALL], [4, CALL]]
    assert batch.tools == CallRules(frozenset({CALL}), frozenset({"</call>"}), 7, 3.0)
    assert list(request.sampling.stop) == ["x"]
    plain = sample_pb2.SamplingParams(stop=["x"])
    assert with_calls(plain, sample_pb2.ToolUse()) is plain


def test_requests_for_tool_calls_are_checked_field_by_field() -> None:
    assert fields_of(a_request(call_token_ids=[CALL], max_calls=10)) == []
    assert fields_of(a_request()) == ["tools"]
    wrong = a_request(call_token_ids=[64], call_strings=[""], max_calls=11, max_wait=duration(0.0))
    assert {"tools.call_token_ids[0]", "tools.max_calls", "tools.max_wait"} <= set(fields_of(wrong))
    assert any(field.startswith("tools.call_strings") for field in fields_of(wrong))
    lossy = a_request(call_token_ids=[CALL])
    lossy.exactness.level, lossy.exactness.lenience = sample_pb2.EXACTNESS_LEVEL_LENIENT, 1.0
    assert fields_of(lossy) == ["exactness.level"]
    anew = a_request(call_token_ids=[CALL])
    anew.max_staleness, anew.stale = 1, rollout_pb2.STALE_REGENERATE
    assert fields_of(anew) == ["stale"]
    twice = a_request(call_token_ids=[CALL], call_strings=["y"])
    twice.sampling.stop.append("y")
    twice.groups[0].sampling.stop_token_ids.append(CALL)
    twice.groups[0].sampling.json_schema = "{}"
    found = fields_of(twice)
    assert found == ["sampling.stop", "groups[0].sampling.json_schema", "groups[0].sampling.stop_token_ids"]
    assert [each.field for each in check_groups(twice.groups, twice, LIMITS)] == found[1:]


# Placement ----------------------------------------------------------------------------------------------


def waiting(name: str, predicted: float = 10.0, home: str = "", context: int = 0) -> WaitingSample[str]:
    return WaitingSample(name, "p", 0, predicted, order=0, home=home, context=context)


def test_a_sample_goes_on_where_its_kv_is_unless_that_is_much_more_loaded_or_full() -> None:
    pool = InstancePool()
    idle, home = InstanceSlots("a", 0, 4), InstanceSlots("b", 0, 2, load=50.0)
    pool.add(idle)
    pool.add(home)
    queue = WaitingQueue[str]()
    queue.push(waiting("near", home="b", context=40))
    placed = queue.place_next(pool)
    assert placed is not None
    assert placed.instance_id == "b"
    queue.push(waiting("far", home="b", context=39))
    placed = queue.place_next(pool)
    assert placed is not None
    assert placed.instance_id == "a"
    home.take("q", 0.0)
    for name, where in (("full", "b"), ("gone", "c")):
        queue.push(waiting(name, home=where, context=1000))
        placed = queue.place_next(pool)
        assert placed is not None
        assert placed.instance_id == "a"


def test_what_has_begun_goes_before_what_has_not() -> None:
    pool, queue = InstancePool(), WaitingQueue[str]()
    pool.add(InstanceSlots("a", 0, 2))
    queue.push(waiting("long", predicted=1000.0))
    queue.push(waiting("begun", predicted=1.0, home="b"))
    placed = [queue.place_next(pool), queue.place_next(pool)]
    assert [each.waiting.ref for each in placed if each is not None] == ["begun", "long"]


def test_a_run_is_charged_for_a_session_once() -> None:
    pool, queue = InstancePool(), WaitingQueue[str]()
    pool.add(InstanceSlots("a", 0, 100))
    order = []
    for number in range(3):
        queue.push(replace(waiting(f"turn-{number}", home="a"), run="sessions"))
        queue.push(replace(waiting(f"plain-{number}"), run="plain"))
    while (placed := queue.place_next(pool)) is not None:
        order.append(placed.waiting.run)
    assert order == ["plain", "sessions", "sessions", "sessions", "plain", "plain"]
