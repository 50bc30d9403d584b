"""What is kept of a running sample, and how drafts are counted."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from paceline.internal.v1 import generation_pb2 as pb
from paceline.times import seconds_of
from paceline.v1 import fleet_pb2, sample_pb2
from services.generation.engine.types import Finish, SampleStep
from services.generation.loop.metrics import EngineMetrics, reached
from services.generation.loop.samples import RunningSample
from services.generation.loop.work_stream import WorkStream
from tests.support.token_columns import columns
from tests.unit.generation.scripted import sample_request


def running(stream: WorkStream, handle: int = 1) -> RunningSample:
    sample = RunningSample(handle, sample_request(f"s{handle}"), stream, arrived=10.0)
    stream.samples[handle] = sample
    return sample


def step(*tokens: int, drafted: int = 0, accepted: int = 0) -> SampleStep:
    return SampleStep("s1", list(tokens), [-1.0] * len(tokens), None, drafted, accepted)


async def test_a_delta_has_the_tokens_since_the_last_one() -> None:
    sample = running(WorkStream(asyncio.get_running_loop()))
    assert sample.take_delta() is None
    sample.record(step(1), 12.0, 12.5, "")
    sample.record(step(2, 3), 13.0, 13.5, "")
    assert sample.take_delta() == pb.Delta(handle=1, tokens=columns([1, 2, 3], [-1, -1, -1]))
    assert sample.take_delta() is None
    sample.record(step(4), 14.0, 14.5, "")
    assert sample.take_delta() == pb.Delta(handle=1, tokens=columns([4], [-1]))
    assert sample.generated == 4


async def test_the_end_tells_drafts_by_drafter_and_the_times() -> None:
    sample = running(WorkStream(asyncio.get_running_loop()))
    sample.record(step(1), 12.0, 12.5, "")
    sample.record(step(2, 3, 4, drafted=5, accepted=2), 13.0, 13.25, "suffix")
    sample.record(step(5, drafted=3, accepted=0), 14.0, 14.25, "reference")
    sample.record(step(6, 7, drafted=1, accepted=1), 15.0, 15.25, "suffix")
    sample.record(step(8), 16.0, 17.0, "")
    finished = sample.finished(Finish.STOP, 20.0)
    sources = {source.drafter: (source.drafted, source.accepted) for source in finished.draft_sources}
    assert sources == {"suffix": (6, 3), "reference": (3, 0)}
    assert (finished.decode_steps, finished.verify_steps) == (5, 3)
    assert (seconds_of(finished.queue_time), seconds_of(finished.generation_time)) == (2.0, 8.0)
    assert seconds_of(finished.prefill_time) == 0.5
    assert (seconds_of(finished.verify_time), seconds_of(finished.plain_time)) == (0.75, 1.0)


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        (Finish.STOP, sample_pb2.FINISH_REASON_STOP),
        (Finish.LENGTH, sample_pb2.FINISH_REASON_LENGTH),
        (None, sample_pb2.FINISH_REASON_ABORTED),
    ],
)
async def test_finish_reasons(finish: Finish | None, reason: int) -> None:
    sample = running(WorkStream(asyncio.get_running_loop()))
    assert sample.finished(finish, 11.0).finish_reason == reason


async def test_a_flush_is_one_response_and_nothing_is_no_response() -> None:
    stream = WorkStream(asyncio.get_running_loop())
    load = fleet_pb2.InstanceLoad(running=2)
    stream.flush(load, 7, 10.0)
    first, second = running(stream, 1), running(stream, 2)
    first.record(step(1), 11.0, 11.5, "")
    second.record(step(2), 11.0, 11.5, "")
    stream.finish(second, second.finished(Finish.STOP, 12.0))
    stream.refuse(pb.Refused(handle=3))
    stream.flush(load, 7, 12.0, everything=True)
    stream.flush(load, 7, 12.0, everything=True)
    response = await asyncio.wait_for(stream.outbox.get(), 5)
    assert isinstance(response, pb.WorkResponse)
    assert {delta.handle: list(delta.tokens.token_ids) for delta in response.deltas} == {1: [1], 2: [2]}
    assert [finished.handle for finished in response.finished] == [2]
    assert [refused.handle for refused in response.refused] == [3]
    assert (response.load, response.policy_version) == (load, 7)
    await asyncio.sleep(0)
    assert stream.outbox.empty()


# -- draft counts ---------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 12), max_size=50))
def test_a_position_is_reached_by_every_longer_length(lengths: list[int]) -> None:
    expected = {
        position: count
        for position in range(max(lengths, default=0))
        if (count := sum(length > position for length in lengths))
    }
    assert dict(reached(Counter(lengths))) == expected


@given(
    st.lists(
        st.integers(1, 6).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted))),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 5),
)
def test_published_counts_are_those_of_the_drafts(drafts: list[tuple[int, int]], every: int) -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry)
    for i, (drafted, accepted) in enumerate(drafts):
        metrics.verified("d", drafted, accepted)
        if i % every == 0:
            metrics.load(fleet_pb2.InstanceLoad())
    metrics.load(fleet_pb2.InstanceLoad())

    def value(name: str, **labels: str) -> float:
        return registry.get_sample_value(f"paceline_speculation_{name}", {"drafter": "d"} | labels) or 0

    for position in range(7):
        counted = [value(f"{kind}_tokens_total", position=str(position)) for kind in ("drafted", "accepted")]
        assert counted == [sum(length > position for length in each) for each in zip(*drafts, strict=True)]
    assert value("verify_steps_total") == len(drafts)


def test_block_efficiency_is_accepted_plus_one() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry)
    for accepted in (0, 2, 4):
        metrics.verified("d", 4, accepted)
    metrics.load(fleet_pb2.InstanceLoad())
    assert registry.get_sample_value("paceline_speculation_block_efficiency", {"drafter": "d"}) == 3.0
