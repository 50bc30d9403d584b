"""One replica: its calls, its memory, and what it refuses."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Iterator

import grpc
import psutil
import pytest
from google.rpc import error_details_pb2, status_pb2

from paceline.internal.v1 import draft_pb2 as pb
from services.contracts.rollout import to_proto
from services.drafts.client import Fetched
from tests.integration.drafts.conftest import CALL, Deployment, StoreProcess, refused, until
from tests.unit.drafts.rollouts import ahead, assert_same, describe, make

MIB = 1 << 20


async def test_what_is_put_is_fetched_counted_and_evicted(deployment: Deployment) -> None:
    replica = await deployment.replica()
    stores = await deployment.client()
    put = [make("a"), make("a", 1), ahead("a", step=2), make("b", length=500), make("c", run="other")]
    assert await stores.put(put) == 5
    assert await stores.put([make("a"), ahead("a", step=1)]) == 1, "the draft is older than the history"
    fetched = await stores.fetch("run", ["a", "b", "nothing", "a"])
    found = fetched.rollouts
    assert fetched.missed == frozenset(), "the store was asked, and has nothing"
    assert sorted(map(describe, found)) == sorted(map(describe, put[:4]))
    ended = ahead("b", step=2, finished=True)
    assert await stores.put([ended]) == 1
    (needed,) = (await stores.fetch("run", ["b"], whole=False)).rollouts
    assert_same(needed, ended)
    evicted = pb.EvictRolloutsRequest(run_id="run", prompt_ids=["b"], kind=pb.ROLLOUT_KIND_PREGENERATED)
    assert (await replica.stub.EvictRollouts(evicted, timeout=CALL)).removed == 1
    stats = await replica.stats()
    assert (stats.prompts, stats.rollouts, stats.tokens) == (3, 5, 540)
    assert 540 * 8 < stats.bytes < stats.budget_bytes
    request = pb.EvictRolloutsRequest(run_id="run", prompt_ids=["a"], kind=pb.ROLLOUT_KIND_HISTORY)
    assert (await replica.stub.EvictRollouts(request, timeout=CALL)).removed == 2
    (left,) = (await stores.fetch("run", ["a"])).rollouts
    assert_same(left, put[2])


async def test_a_shard_larger_than_any_message_arrives(deployment: Deployment) -> None:
    await deployment.replica()
    stores = await deployment.client()
    put = [make("a", slot, length=200_000) for slot in range(16)]
    assert sum(each.nbytes for each in put) > deployment.config().max_message_bytes
    assert await stores.put(put) == 16
    found = (await stores.fetch("run", ["a"])).rollouts
    assert [each.slot for each in found] == list(range(16))
    assert all(len(each.tokens) == 200_000 for each in found)


async def test_memory_is_bounded_whatever_is_put(deployment: Deployment) -> None:
    replica = await deployment.replica(0, f"--budget-bytes={16 * MIB}")
    stores = await deployment.client()
    process = psutil.Process(replica.child.pid)

    async def put(begin: int, end: int) -> None:
        for number in range(begin, end):
            await stores.put([make(f"p{number}", slot, length=8192) for slot in range(16)])
            assert (await replica.stats()).bytes <= 16 * MIB

    await put(0, 40)  # more than twice the budget: what the process needs at all is in use now
    before = process.memory_info().rss
    await put(40, 240)
    assert process.memory_info().rss - before < 32 * MIB, "after 200 MiB more"
    stats = await replica.stats()
    assert stats.evicted > 3000
    assert stats.bytes > 12 * MIB, "the budget is used"
    assert (await stores.fetch("run", ["p0"])).rollouts == []
    assert len((await stores.fetch("run", ["p239"])).rollouts) == 16


async def test_a_rollout_that_is_not_valid_is_named_by_its_place_in_the_stream(
    deployment: Deployment,
) -> None:
    replica = await deployment.replica()
    valid = [to_proto(make("a", slot)) for slot in range(3)]
    for field, value in (("run_id", ""), ("prompt_id", ""), ("logprobs", b""), ("token_ids", b"123")):
        broken = to_proto(make("a"))
        setattr(broken, field, value)
        requests = [pb.PutRolloutsRequest(rollouts=each) for each in (valid[:2], [valid[2], broken])]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await replica.stub.PutRollouts(iter(requests), timeout=CALL)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert violated(caught.value) == [f"rollouts[3].{field}"]
    assert (await replica.stats()).rollouts == 2, "what came in messages before is stored, and no more"


async def test_requests_that_say_nothing_are_refused(deployment: Deployment) -> None:
    replica = await deployment.replica()
    for call, request, fields in (
        (replica.stub.EvictRollouts, pb.EvictRolloutsRequest(), ["run_id"]),
        (replica.stub.EvictRollouts, pb.EvictRolloutsRequest(kind=7), ["kind"]),
        (replica.stub.EvictRollouts, pb.EvictRolloutsRequest(prompt_ids=["a", ""]), ["prompt_ids[1]"]),
        (first_of(replica), pb.FetchRolloutsRequest(), ["run_id", "prompt_ids"]),
        (first_of(replica), pb.FetchRolloutsRequest(run_id="r", prompt_ids=[""]), ["prompt_ids[0]"]),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(request, timeout=CALL)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert violated(caught.value) == fields


async def test_only_who_has_the_token_is_served(deployment: Deployment) -> None:
    replica = await deployment.replica(token="open sesame")
    mine = await deployment.client(token="open sesame")
    stranger = await deployment.client()
    assert await mine.put([make("a")]) == 1
    assert await stranger.fetch("run", ["a"]) == Fetched([], frozenset({"a"}))
    await until(lambda: refused(stranger), "it is left alone for a while")
    assert len((await mine.fetch("run", ["a", "b"])).rollouts) == 1
    stub = await replica.connect(deployment.config())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetDraftStats(pb.GetDraftStatsRequest(), timeout=CALL)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_metrics_say_what_is_there_and_what_happened(deployment: Deployment) -> None:
    replica = await deployment.replica(0, f"--budget-bytes={MIB}")
    stores = await deployment.client()
    await stores.put([make("a", length=100), ahead("a", 1, step=2, length=50), ahead("a", step=1)])
    await stores.fetch("run", ["a", "b"])
    await stores.put([make(f"p{number}", length=10_000) for number in range(20)])
    metrics = dict(await asyncio.to_thread(lambda: list(scrape(replica))))
    stats = await replica.stats()
    assert metrics["paceline_drafts_bytes"] == stats.bytes
    assert metrics["paceline_drafts_budget_bytes"] == MIB
    assert metrics["paceline_drafts_tokens"] == stats.tokens
    assert metrics["paceline_drafts_prompts"] == stats.prompts
    assert metrics['paceline_drafts_rollouts{kind="history"}'] == stats.rollouts
    assert metrics['paceline_drafts_puts_total{outcome="stored"}'] == 22
    assert metrics['paceline_drafts_puts_total{outcome="refused"}'] == 1
    assert metrics["paceline_drafts_fetches_total"] == 1
    assert metrics['paceline_drafts_prompts_fetched_total{outcome="hit"}'] == 1
    assert metrics['paceline_drafts_prompts_fetched_total{outcome="miss"}'] == 1
    assert metrics["paceline_drafts_tokens_fetched_total"] == 150
    assert metrics['paceline_drafts_removals_total{cause="cold"}'] == stats.evicted > 0
    assert metrics["paceline_drafts_snapshot_timestamp_seconds"] == 0


async def test_a_replica_gives_way_to_a_younger_one_of_its_name(deployment: Deployment) -> None:
    older = await deployment.replica(0)
    younger = await deployment.replica(0)
    deadline = time.monotonic() + CALL
    while older.child.alive:
        assert time.monotonic() < deadline, "two replicas have the same name"
        await asyncio.sleep(0.02)
    assert older.child.returncode == 1
    assert "SUPERSEDED" in older.log() or "another process has registered" in older.log()
    assert (await younger.stats()).rollouts == 0


async def test_it_ends_cleanly_when_told_to(deployment: Deployment) -> None:
    replica = await deployment.replica()
    stores = await deployment.client()
    await asyncio.to_thread(replica.child.stop, CALL)
    assert replica.child.returncode == 0
    assert (await stores.fetch("run", ["a"])).rollouts == []


def first_of(replica: StoreProcess):  # type: ignore[no-untyped-def]
    """FetchRollouts as a call that raises when it is awaited."""

    async def call(request: pb.FetchRolloutsRequest, timeout: float) -> pb.FetchRolloutsResponse:  # noqa: ASYNC109
        return await replica.stub.FetchRollouts(request, timeout=timeout).read()

    return call


def violated(error: grpc.aio.AioRpcError) -> list[str]:
    """Return the fields that an error names."""
    (raw,) = [value for key, value in error.trailing_metadata() if key == "grpc-status-details-bin"]
    for detail in status_pb2.Status.FromString(raw).details:
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            found = error_details_pb2.BadRequest.FromString(detail.value)
            return [each.field for each in found.field_violations]
    return []


def scrape(replica: StoreProcess) -> Iterator[tuple[str, float]]:
    """The samples that Prometheus would get."""
    with urllib.request.urlopen(replica.metrics_url(), timeout=CALL) as answer:
        for line in answer.read().decode().splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                yield name, float(value)
