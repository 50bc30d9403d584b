"""Events of a batch's stream: their bytes, and how many samples share one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.calls.rollouts import BatchReading, RolloutCalls
from paceline.v1 import rollout_pb2 as pb
from paceline.v1 import sample_pb2
from services.gateway.api import delivery
from services.gateway.api.delivery import events_of
from services.gateway.journal.record import BatchHead, BatchRecord
from tests.support.token_columns import columns
from tests.unit.sdk.scripted_transport import ScriptedTransport


def record_of(samples: int) -> BatchRecord:
    request = pb.SubmitRolloutsRequest(
        run_id="r", batch_id="b", groups=[pb.Group(prompt_id="p", samples=samples)]
    )
    record = BatchRecord(request, BatchHead("f", 0.0, samples, None), 1)
    for index in range(samples):
        record.end(index, _payload(index))
    record.confirm(range(samples))
    return record


def _payload(index: int) -> bytes:
    sample = sample_pb2.Sample(prompt_id="p", slot=index, tokens=columns([index, 150_000], [-1.0, -0.5]))
    return sample.SerializeToString()


@given(samples=st.integers(1, 40), most=st.integers(0, 50), room=st.integers(1, 400), data=st.data())
def test_every_sample_comes_once_in_events_of_the_size_that_the_caller_takes(
    samples: int, most: int, room: int, data: st.DataObject
) -> None:
    record = record_of(samples)
    chunk = record.after(0, samples)
    there = data.draw(st.integers(0, samples))
    payloads = [_payload(index) if at < there else None for at, (_, index) in enumerate(chunk)]
    limit, delivery.MOST_BYTES = delivery.MOST_BYTES, room
    try:
        raw = [event.SerializeToString() for event in events_of(record, chunk, payloads, max(1, most))]
    finally:
        delivery.MOST_BYTES = limit
    events = [pb.StreamRolloutsResponse.FromString(each) for each in raw]
    assert all(len(event.earlier) < max(1, most) for event in events)
    assert all((event.finished, event.total) == (samples, samples) for event in events)
    sizes = [
        [each.sample.ByteSize() for each in event.earlier] + [event.sample.ByteSize()] for event in events
    ]
    assert all(len(size) == 1 or sum(size) <= room for size in sizes)
    place = BatchReading(RolloutCalls(ScriptedTransport({})), "r", "b")
    read = [each for event in events for each in place.read(event)]
    assert [(each.cursor, each.sample.slot) for each in read] == chunk[:there]
    assert all(list(each.sample.token_ids) == [each.sample.slot, 150_000] for each in read)
