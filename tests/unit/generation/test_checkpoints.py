"""Checkpoints of samples, and what a caller gets of its stream however slowly it reads."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from itertools import count, pairwise
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import fleet_pb2, sample_pb2
from services.generation.engine.types import Finish, SampleStep
from services.generation.loop import work_stream
from services.generation.loop.samples import RunningSample
from services.generation.loop.work_stream import CheckpointRules, Checkpoints, ResponseOutbox, WorkStream
from services.generation.migration.arrivals import UnclaimedStream
from tests.support.token_columns import columns
from tests.unit.generation.scripted import sample_request

RULES = CheckpointRules(tokens=100, seconds=5.0)
LOAD = fleet_pb2.InstanceLoad(running=1)


@pytest.fixture
def events() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


class Work:
    """A stream whose samples generate what they are told to; every token is a new number."""

    def __init__(self, events: asyncio.AbstractEventLoop, rules: CheckpointRules = RULES) -> None:
        # Else the first checkpoint of a sample comes after any part of what the rules say.
        with patch.object(work_stream.random, "random", return_value=0.5):
            self.stream = WorkStream(events, rules)
        self.now = 0.0
        self.numbers = count(1)
        # By handle: the tokens that were generated, and the ends, in order.
        self.made: dict[int, list[int | str]] = {}
        self.told: dict[int, list[int | str]] = {}

    def start(self, handle: int, *, streamed: bool = False) -> RunningSample:
        sample = RunningSample(handle, sample_request("s"), self.stream, self.now, streamed)
        self.stream.add(sample, self.now)
        return sample

    def step(self, tokens: int = 1, seconds: float = 0.1) -> None:
        self.now += seconds
        for sample in self.stream.samples.values():
            new = [next(self.numbers) for _ in range(tokens)]
            self.made.setdefault(sample.handle, []).extend(new)
            sample.record(SampleStep("s", new, [-float(token) for token in new]), self.now, self.now, "")
            if len(sample.tokens) >= sample.quota:
                self.stream.reached(sample)

    def end(self, handle: int) -> None:
        sample = self.stream.samples[handle]
        self.stream.finish(sample, sample.finished(Finish.STOP, self.now))
        self.made.setdefault(handle, []).append("finished")

    def move(self, handle: int) -> None:
        sample = self.stream.samples[handle]
        self.stream.move(sample, pb.Moved(handle=handle, response_tokens=len(sample.response)))
        self.made.setdefault(handle, []).append("moved")

    def refuse(self, handle: int) -> None:
        self.stream.refuse(pb.Refused(handle=handle))
        self.made.setdefault(handle, []).append("refused")

    def flush(self, *, everything: bool = False) -> None:
        self.stream.flush(LOAD, 3, self.now, everything=everything)

    def read(self) -> pb.WorkResponse | None:
        """Take one response in, in the order in which the gateway does."""
        if self.stream.outbox.empty():
            return None
        response = self.stream.outbox.get_nowait()
        assert isinstance(response, pb.WorkResponse)
        assert (response.load, response.policy_version) == (LOAD, 3)
        for delta in response.deltas:
            assert list(delta.tokens.logprobs) == [-float(token) for token in delta.tokens.token_ids]
            self.told.setdefault(delta.handle, []).extend(delta.tokens.token_ids)
        for kind in ("finished", "refused", "moved"):
            for event in getattr(response, kind):
                self.told.setdefault(event.handle, []).append(kind)
        return response

    def responses(self) -> list[pb.WorkResponse]:
        return list(iter(self.read, None))


def handles(responses: list[pb.WorkResponse]) -> list[int]:
    return [delta.handle for response in responses for delta in response.deltas]


def test_a_sample_reports_after_so_many_tokens(events: asyncio.AbstractEventLoop) -> None:
    work = Work(events, CheckpointRules(tokens=10, seconds=1000.0))
    work.start(1)
    for _ in range(100):
        work.step(seconds=1.0)
        work.flush()
        assert len(work.stream.samples[1].tokens) < 10
    sizes = [len(d.tokens.token_ids) for r in work.responses() for d in r.deltas]
    # The reader came late: one delta.
    assert sum(sizes) >= 90
    assert len(sizes) == 1


def test_a_sample_reports_after_so_many_seconds(events: asyncio.AbstractEventLoop) -> None:
    work = Work(events)
    work.start(1)
    reported = []
    for _ in range(200):
        work.step()
        work.flush()
        reported += [work.now] * len(handles(work.responses()))
    gaps = [b - a for a, b in pairwise(reported)]
    assert reported[0] <= RULES.seconds + RULES.message_seconds
    assert all(RULES.seconds <= gap <= RULES.seconds + RULES.message_seconds + 0.2 for gap in gaps)
    assert len(gaps) in (2, 3)


def test_a_streamed_sample_reports_with_every_flush(events: asyncio.AbstractEventLoop) -> None:
    work = Work(events)
    work.start(1, streamed=True)
    work.start(2)
    for _ in range(5):
        work.step(2)
        work.flush()
        (response,) = work.responses()
        assert {len(delta.tokens.token_ids) for delta in response.deltas if delta.handle == 1} == {2}


def test_an_end_is_sent_at_once_with_the_last_tokens(events: asyncio.AbstractEventLoop) -> None:
    work = Work(events)
    for handle in (1, 2, 3):
        work.start(handle)
    work.step(3, seconds=0.001)
    work.end(1)
    work.move(2)
    work.flush()
    work.responses()
    assert work.told == {1: work.made[1], 2: work.made[2]}
    assert work.told[1][-1] == "finished"


def test_a_caller_with_many_streams_gets_ends_together(events: asyncio.AbstractEventLoop) -> None:
    work = Work(events)
    work.stream.report_every(0.5)
    for handle in range(40):
        work.start(handle)
    sent = []
    for handle in range(39):
        work.step()
        work.end(handle)
        work.flush()
        sent += [(work.now, len(response.finished)) for response in work.responses()]
    assert all(0.4999 < later - before < 0.61 for (before, _), (later, _) in pairwise(sent))
    assert sum(ended for _, ended in sent) + 5 >= 39
    # Nothing else runs, so nobody else could end soon.
    work.step(seconds=0.01)
    work.end(39)
    work.flush()
    assert len(work.responses()) == 1
    assert work.told == work.made


@pytest.mark.parametrize("what", ["cancelled", "moved", "refused", "streamed"])
def test_what_somebody_waits_for_is_not_held_back(events: asyncio.AbstractEventLoop, what: str) -> None:
    work = Work(events)
    work.stream.report_every(1.0)
    sample = work.start(1, streamed=what == "streamed")
    work.start(2)
    work.step(seconds=0.01)
    if what == "cancelled":
        work.stream.finish(sample, sample.finished(None, work.now))
    elif what == "moved":
        work.move(1)
    elif what == "refused":
        work.refuse(3)
    else:
        work.end(1)
    work.flush()
    assert len(work.responses()) == 1


def test_silence_grows_with_the_interval_within_bounds(events: asyncio.AbstractEventLoop) -> None:
    stream = Work(events).stream
    silences = []
    for interval in (0.0, 0.1, 0.4, 1.0, 1e9):
        stream.report_every(interval)
        silences.append(stream._silence)
    assert silences == [1.0, 1.0, 1.6, 2.0, 2.0]


def test_the_load_comes_every_second_while_samples_run_and_not_otherwise(
    events: asyncio.AbstractEventLoop,
) -> None:
    work = Work(events, CheckpointRules(tokens=1 << 30, seconds=1e9))
    for _ in range(100):
        work.step()
        work.flush()
    assert work.responses() == []
    work.start(1)
    sent = 0
    for _ in range(100):
        work.step()
        work.flush()
        sent += len(work.responses())
    assert sent in (9, 10)


def test_samples_that_begin_together_do_not_report_together(events: asyncio.AbstractEventLoop) -> None:
    work = Work(events)
    for handle in range(256):
        work.start(handle)
    sizes, reports = [], Counter[int]()
    for _ in range(200):
        work.step()
        work.flush()
        for response in work.responses():
            sizes.append(len(response.deltas))
            reports.update(handles([response]))
    # Twenty seconds: every sample four times, in a message a second.
    assert max(sizes) <= 2 * 256 / 5
    assert len(sizes) in range(18, 21)
    assert set(reports.values()) <= {3, 4}


def test_a_flush_looks_only_at_samples_that_are_due(events: asyncio.AbstractEventLoop) -> None:
    asked: list[int] = []

    class Watched(RunningSample):
        def take_delta(self) -> pb.Delta | None:
            asked.append(self.handle)
            return super().take_delta()

    work = Work(events)
    for handle in range(1000):
        work.stream.add(Watched(handle, sample_request("s"), work.stream, 0.0), 0.0)
    work.step(1, seconds=0.01)
    asked.clear()
    work.flush()
    assert asked == []
    work.end(7)
    work.flush()
    assert len(asked) <= 1 + 1000 * 0.01 * 2


@given(st.floats(0, 1), st.floats(0.2, 1))
def test_some_of_sixteen_short_attempts_report(offset: float, share: float) -> None:
    """A sample is FAILED after 16 attempts in a row that brought nothing."""
    samples: dict[int, RunningSample] = {}
    checkpoints = Checkpoints(RULES, samples, offset)
    reported = False
    for attempt in range(16):
        samples[1] = RunningSample(1, sample_request("s"), UnclaimedStream(), 0.0)
        checkpoints.begin(samples[1], 10.0 * attempt)
        reported |= bool(checkpoints.take(10.0 * attempt + share * RULES.seconds))
    assert reported


OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(["start", "stream", "end", "move", "refuse"]), st.integers(0, 4)),
    st.tuples(st.sampled_from(["step"]), st.integers(0, 9)),
    st.tuples(st.sampled_from(["flush", "flush", "everything", "read", "read"]), st.just(0)),
)


@settings(max_examples=150)
@given(st.lists(OPERATIONS, max_size=80), st.sampled_from([1, 60, 400, 1 << 20]), st.sampled_from([0, 0.5]))
def test_whatever_happens_every_token_is_told_once_and_before_the_end(
    operations: list[tuple[str, int]], most_bytes: int, interval: float
) -> None:
    """A handle may be used again once its end has been read."""
    events = asyncio.new_event_loop()
    work = Work(events, CheckpointRules(tokens=12, seconds=1.0))
    work.stream.report_every(interval)
    before, work_stream.MOST_BYTES = work_stream.MOST_BYTES, most_bytes
    try:
        for name, value in operations:
            _do(work, name, value)
        work.flush(everything=True)
        work.responses()
        assert work.told == {handle: made for handle, made in work.made.items() if made}
    finally:
        work_stream.MOST_BYTES = before
        events.close()


def _do(work: Work, name: str, value: int) -> None:
    runs = value in work.stream.samples
    free = not runs and work.told.get(value, []) == work.made.get(value, [])
    if name in ("start", "stream") and free:
        work.start(value, streamed=name == "stream")
    elif name in ("end", "move") and runs:
        (work.end if name == "end" else work.move)(value)
    elif name == "refuse" and free:
        work.refuse(value)
    elif name == "step":
        work.step(value, seconds=0.04 * value)
    elif name in ("flush", "everything"):
        sent_at = work.stream._sent_at
        work.flush(everything=name == "everything")
        if work.now - sent_at >= work.stream._silence:
            assert all(len(each.tokens) < 12 for each in work.stream.samples.values())
    elif name == "read":
        work.read()


# -- slow readers ---------------------------------------------------------------------------------------------


def test_what_waits_for_a_slow_reader_is_one_response(events: asyncio.AbstractEventLoop) -> None:
    work = Work(events)
    for handle in range(8):
        work.start(handle, streamed=True)
    for _ in range(1000):
        work.step()
        work.flush()
    work.end(3)
    work.flush()
    assert len(work.stream.outbox._waiting) == 1
    (response,) = work.responses()
    assert len(response.deltas) == 8
    assert work.told == work.made


def test_responses_are_merged_up_to_a_size(events: asyncio.AbstractEventLoop) -> None:
    work = Work(events)
    for handle in range(8):
        work.start(handle, streamed=True)
    for _ in range(400):
        work.step(100)
        work.flush()
    responses = work.responses()
    sizes = [response.ByteSize() for response in responses]
    assert max(sizes) <= work_stream.MOST_BYTES
    assert min(sizes[:-1]) > work_stream.MOST_BYTES / 2
    assert work.told == work.made


def test_verified_logprobs_are_merged_with_their_tokens(events: asyncio.AbstractEventLoop) -> None:
    box = ResponseOutbox(events)
    for tokens, verified in (([1, 2], [-1.0, -2.0]), ([3, 4], [-3.0]), ([5], [])):
        delta = pb.Delta(handle=1, tokens=columns(tokens, tokens), verified_logprobs=verified)
        box.put(pb.WorkResponse(deltas=[delta]))
    response = box.get_nowait()
    assert isinstance(response, pb.WorkResponse)
    (delta,) = response.deltas
    assert (list(delta.tokens.token_ids), list(delta.verified_logprobs)) == ([1, 2, 3, 4, 5], [-1, -2, -3])


def test_merged_tokens_keep_their_versions(events: asyncio.AbstractEventLoop) -> None:
    box = ResponseOutbox(events)
    for token, version in ((1, 7), (2, 7), (3, 8), (4, 8)):
        for handle in (1, 2):
            delta = pb.Delta(handle=handle, tokens=columns([token], [0.0], version))
            box.put(pb.WorkResponse(deltas=[delta]))
    response = box.get_nowait()
    assert isinstance(response, pb.WorkResponse)
    found = {each.handle: each.tokens for each in response.deltas}
    assert [list(found[handle].token_ids) for handle in (1, 2)] == [[1, 2, 3, 4]] * 2
    runs = [(run.tokens, run.policy_version) for run in found[1].versions for _ in range(run.tokens)]
    assert runs == [(1, 7), (1, 7), (1, 8), (1, 8)]


def test_the_end_of_the_stream_comes_after_everything(events: asyncio.AbstractEventLoop) -> None:
    box = ResponseOutbox(events)
    error = RuntimeError("gone")
    box.put(pb.WorkResponse(finished=[pb.Finished(handle=1)]))
    box.put(error)
    box.put(pb.WorkResponse(finished=[pb.Finished(handle=2)]))
    assert isinstance(box.get_nowait(), pb.WorkResponse)
    assert box.get_nowait() is error


async def test_a_reader_that_waits_is_woken_from_another_thread() -> None:
    box = ResponseOutbox(asyncio.get_running_loop())
    reader = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    reason = sample_pb2.FINISH_REASON_ABORTED
    event = pb.WorkResponse(finished=[pb.Finished(handle=1, finish_reason=reason)])
    await asyncio.to_thread(box.put, event)
    assert await asyncio.wait_for(reader, 60) is event
    assert box.empty()
