"""Pages of batches, and the status of one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.v1 import rollout_pb2 as pb
from services.contracts.errors import InvalidArgument
from services.gateway.api.run_batches import page_of, status_of
from services.gateway.journal.record import BatchHead, BatchRecord


def record(
    run_id: str = "run", batch_id: str = "b", accepted_at: float = 1.5, samples: int = 3
) -> BatchRecord:
    group = pb.Group(prompt_id="p", prompt_token_ids=[1], samples=samples)
    request = pb.SubmitRolloutsRequest(
        run_id=run_id, batch_id=batch_id, step=7, policy_version=2, groups=[group]
    )
    return BatchRecord(request, BatchHead("digest", accepted_at, samples, None), 1)


RECORDS = st.lists(
    st.builds(
        record,
        run_id=st.sampled_from(["a", "b", "a.b"]),
        batch_id=st.text("xyz:", min_size=1, max_size=3),
        accepted_at=st.sampled_from([0.0, 0.1, 1 / 3, 1e9 + 0.1]),
    ),
    unique_by=lambda each: each.key,
    max_size=12,
)


@given(RECORDS, st.integers(1, 4), st.sampled_from(["", "a"]), st.lists(st.integers(0, 11)))
def test_pages_have_every_batch_once_whatever_goes_meanwhile(
    records: list[BatchRecord], size: int, run_id: str, going: list[int]
) -> None:
    found, token, gone = list[pb.BatchStatus](), "", set[tuple[str, str]]()
    for _ in range(len(records) + 1):
        left = [each for each in records if each.key not in gone]
        page = page_of(left, pb.ListBatchesRequest(run_id=run_id, page_size=size, page_token=token))
        assert len(page.batches) <= size
        found += page.batches
        token = page.next_page_token
        if not token:
            break
        if going and (number := going.pop()) < len(records):
            gone.add(records[number].key)
    assert not token
    names = [(each.run_id, each.batch_id) for each in found]
    assert len(set(names)) == len(names)
    assert {each.key for each in records if run_id in ("", each.key[0])} - gone <= set(names)
    times = [each.accepted_at.ToNanoseconds() for each in found]
    assert times == sorted(times)


@pytest.mark.parametrize("token", ["x", "1\n2", "1\n2\n3\n4", "soon\nrun\nbatch"])
def test_a_token_that_is_none_is_an_invalid_argument(token: str) -> None:
    with pytest.raises(InvalidArgument, match="page_token"):
        page_of([record()], pb.ListBatchesRequest(page_token=token))


def test_the_status_counts_what_has_ended_and_what_was_acknowledged() -> None:
    batch = record()
    first, second = batch.end(1, b"one"), batch.end(0, b"zero")
    assert (status_of(batch).finished, status_of(batch).cursor) == (0, 0), "Redis does not have them yet"
    batch.confirm([1, 0])
    batch.acknowledge(first)
    status = status_of(batch)
    assert (status.total, status.finished, status.acknowledged, status.cursor) == (3, 2, 1, second)
    assert (status.step, status.policy_version, status.accepted_at.ToNanoseconds()) == (7, 2, 1_500_000_000)
