"""Pre-generation's decisions: what is reported, when the coordinator is asked, what goes to the store."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import ConnectionError

from paceline.internal.v1 import bubble_pb2 as pb
from paceline.internal.v1 import bubble_pb2_grpc as rpc
from paceline.v1 import sample_pb2
from services.contracts.rollout import RolloutKind, StoredRollout
from services.generation.pregeneration.background import EngineAvailability, PollSituation, work_item
from services.generation.pregeneration.leases import DraftLease, DraftLeases
from services.generation.pregeneration.pregenerator import SERVICE, CoordinatorConnection, CoordinatorGone
from services.generation.pregeneration.upload_queue import UploadQueue
from services.platform.config import ServiceConfig
from services.platform.redis.registry import InstanceRecord

WAIT = 60.0
FREE, BUSY = EngineAvailability(True, False), EngineAvailability(False, True)


def item(lease: int, slot: int = 0, **fields: int) -> pb.PregenerationTask:
    return pb.PregenerationTask(
        lease=lease,
        run_id="run",
        prompt_id="p",
        slot=slot,
        step=4,
        seed=fields.pop("seed", 100 + slot),
        **fields,
    )


def progress(leases: DraftLeases) -> dict[int, tuple[int, bool, bool]]:
    return {each.lease: (each.tokens, each.finished, each.returned) for each in leases.progress()}


# -- leases -----------------------------------------------------------------------------------------------


def test_an_item_is_reported_until_the_coordinator_knows_its_end() -> None:
    leases = DraftLeases()
    (lease,) = leases.take([item(7)], version=1, room=4)
    assert progress(leases) == {7: (0, False, False)}
    leases.grow(lease.handle, [5, 6], [-1.0, -2.0])
    first = leases.progress()
    leases.end(lease.handle, finished=True)
    leases.reported(first)
    assert progress(leases) == {7: (2, True, False)}, "its end was not in that report"
    leases.reported(leases.progress())
    assert progress(leases) == {}


def test_what_ended_without_finishing_is_given_back() -> None:
    leases = DraftLeases()
    (lease,) = leases.take([item(7)], version=1, room=4)
    leases.grow(lease.handle, [5], [-1.0])
    assert leases.end(lease.handle, finished=False) is lease
    assert leases.end(lease.handle, finished=True) is None
    assert progress(leases) == {7: (1, False, True)}
    assert leases.running == 0
    assert leases.news == 1


def test_items_beyond_the_room_are_given_back() -> None:
    leases = DraftLeases()
    assert len(leases.take([item(n, slot=n) for n in range(1, 6)], version=1, room=2)) == 2
    assert [each for each, (_, _, returned) in progress(leases).items() if returned] == [3, 4, 5]


def test_another_coordinator_voids_the_numbers_and_the_items_go_on() -> None:
    leases = DraftLeases()
    kept, ended = leases.take([item(7, slot=0), item(8, slot=1)], version=1, room=4)
    leases.grow(kept.handle, [5], [-1.0])
    leases.end(ended.handle, finished=True)
    leases.void(epoch=2)
    assert progress(leases) == {}
    assert (leases.running, leases.epoch) == (1, 2)
    # The new one gives what is running already, among others.
    (fresh,) = leases.take([item(1, slot=0), item(2, slot=1)], version=1, room=4)
    assert fresh.number == 2
    assert progress(leases) == {1: (1, False, False), 2: (0, False, False)}
    assert leases.end(kept.handle, finished=True) is kept
    assert progress(leases)[1] == (1, True, False)


def test_an_item_of_another_version_or_seed_is_not_what_is_running() -> None:
    leases = DraftLeases()
    leases.take([item(7)], version=1, room=4)
    leases.void(epoch=2)
    assert len(leases.take([item(1, seed=999)], version=1, room=4)) == 1
    assert len(leases.take([item(2)], version=2, room=4)) == 1


def test_a_void_item_ends_without_a_report_but_not_without_its_tokens() -> None:
    leases = DraftLeases()
    (lease,) = leases.take([item(7)], version=1, room=4)
    leases.void(epoch=2)
    leases.grow(lease.handle, [5], [-1.0])
    ended = leases.end(lease.handle, finished=False)
    assert ended is not None
    assert ended.store().tokens.tolist() == [5]
    assert (leases.news, leases.running, progress(leases)) == (0, 0, {})


def test_revoked_items_are_ended_and_nothing_more_is_told_of_them() -> None:
    leases = DraftLeases()
    running, other, ended = leases.take([item(n, slot=n) for n in (1, 2, 3)], version=1, room=4)
    leases.end(ended.handle, finished=True)
    assert leases.revoke([1, 3, 99]) == [running.handle]
    assert progress(leases) == {2: (0, False, False)}
    leases.end(running.handle, finished=False)
    assert progress(leases) == {2: (0, False, False)}
    assert other.number == 2


def test_an_item_given_twice_is_taken_once() -> None:
    leases = DraftLeases()
    assert len(leases.take([item(7)], version=1, room=4)) == 1
    assert leases.take([item(7)], version=1, room=4) == []
    assert leases.running == 1


def test_a_draft_says_what_it_is() -> None:
    leases = DraftLeases()
    (lease,) = leases.take([item(7, slot=3)], version=6, room=4)
    leases.grow(lease.handle, [5, 2**32 - 1], [-0.5, -1.5])
    draft = lease.store()
    assert (draft.run_id, draft.prompt_id, draft.slot, draft.step, draft.seed) == ("run", "p", 3, 4, 103)
    assert (draft.version, draft.kind, draft.finished) == (6, RolloutKind.PREGENERATED, False)
    assert (draft.tokens.dtype, draft.logprobs.dtype) == (np.uint32, np.float32)
    assert draft.tokens.tolist() == [5, 2**32 - 1]
    assert draft.logprobs.tolist() == [-0.5, -1.5]
    leases.grow(lease.handle, [9], [-1.0])
    leases.end(lease.handle, finished=True)
    assert len(draft.tokens) == 2, "a draft that was made does not change"
    assert lease.store().finished


@given(sizes=st.lists(st.integers(1, 60), max_size=80))
def test_stored_beginnings_cost_no_more_than_their_share(sizes: Sequence[int]) -> None:
    leases = DraftLeases()
    (lease,) = leases.take([item(7)], version=1, room=4)
    sent = 0
    for size in sizes:
        leases.grow(lease.handle, [1] * size, [-1.0] * size)
        for each in leases.growing():
            sent += len(each.store().tokens)
        missing = len(lease.tokens) - lease.stored
        # Lost with the instance: little beside what is kept, or little at all.
        assert missing < max(32, lease.stored / 8)
    assert sent <= 10 * len(lease.tokens)


def test_an_end_is_stored_once_with_what_is_new() -> None:
    leases = DraftLeases()
    (lease,) = leases.take([item(7)], version=1, room=4)
    leases.grow(lease.handle, [1] * 40, [-1.0] * 40)
    assert leases.growing() == [lease]
    lease.store()
    assert leases.growing() == []
    leases.end(lease.handle, finished=False)
    assert not lease.worth_storing, "the store has all of it"
    (empty, short) = leases.take([item(8, slot=1), item(9, slot=2)], version=1, room=4)
    leases.end(empty.handle, finished=False)
    assert not empty.worth_storing
    leases.grow(short.handle, [1], [-1.0])
    short.store()
    leases.end(short.handle, finished=True)
    assert short.worth_storing, "that it is finished is new"


def test_an_item_that_resumes_counts_what_was_there() -> None:
    known = rollout(tokens=[4, 5, 6, 7])
    lease = DraftLease(1, 1, item(1), version=1)
    lease.resume(known)
    assert (list(lease.tokens), lease.stored) == ([4, 5, 6, 7], 4)
    limited = item(2)
    limited.sampling.max_tokens = 3
    short = DraftLease(2, 2, limited, version=1)
    short.resume(known)
    assert list(short.tokens) == [4, 5, 6]


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (sample_pb2.EXACTNESS_LEVEL_EXACT, sample_pb2.EXACTNESS_LEVEL_UNSPECIFIED),
        (sample_pb2.EXACTNESS_LEVEL_COUPLED_HISTORY, sample_pb2.EXACTNESS_LEVEL_UNSPECIFIED),
        (sample_pb2.EXACTNESS_LEVEL_LENIENT, sample_pb2.EXACTNESS_LEVEL_UNSPECIFIED),
        (sample_pb2.EXACTNESS_LEVEL_REJECTION, sample_pb2.EXACTNESS_LEVEL_REJECTION),
    ],
)
def test_an_item_is_sampled_by_the_policy_alone(level: int, expected: int) -> None:
    given = item(7, slot=2)
    given.prompt_token_ids.extend([1, 2])
    given.sampling.temperature = 0.5
    given.exactness.level = level  # type: ignore[assignment]
    work = work_item(DraftLease(7, 31, given, version=9))
    assert (work.handle, work.policy_version, work.seed) == (31, 9, 102)
    assert (work.run_id, work.prompt_id, work.slot, work.step) == ("run", "p", 2, 4)
    assert list(work.prompt_token_ids) == [1, 2]
    assert work.sampling.temperature == 0.5
    assert work.exactness.level == expected


# -- polling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("situation", "polls"),
    [
        (PollSituation(FREE, running=0, news=False, due=False), True),
        (PollSituation(FREE, running=3, news=False, due=False), False),
        (PollSituation(FREE, running=3, news=False, due=True), True),
        (PollSituation(FREE, running=3, news=True, due=False), True),
        (PollSituation(BUSY, running=0, news=False, due=False), False),
        (PollSituation(BUSY, running=0, news=True, due=False), True),
        (PollSituation(BUSY, running=0, news=False, due=True), False),
    ],
)
def test_polled_is_when_there_is_something_to_say_or_to_do(situation: PollSituation, polls: bool) -> None:
    assert situation.calls_for_poll is polls


@given(running=st.integers(0, 300), seats=st.integers(1, 256), reserved=st.integers(0, 300))
def test_room_is_what_real_samples_leave(running: int, seats: int, reserved: int) -> None:
    room = PollSituation(FREE, running, news=False, due=False).room(seats, reserved)
    assert 0 <= room <= seats
    assert not room or running + room + reserved == seats
    assert PollSituation(BUSY, running, news=False, due=False).room(seats, reserved) == 0


# -- puts -------------------------------------------------------------------------------------------------


def rollout(slot: int = 0, tokens: Sequence[int] = (1,), seed: int = 0) -> StoredRollout:
    array = np.asarray(tokens, np.uint32)
    logprobs = np.zeros(len(array), np.float32)
    return StoredRollout("run", "p", slot, 1, RolloutKind.PREGENERATED, 4, seed, array, logprobs, False)


class Store:
    """A store whose calls wait for a permit, and that can be away."""

    def __init__(self) -> None:
        self.available = True
        self.fails = False
        self.calls: list[list[tuple[int, int]]] = []
        self.permits = asyncio.Semaphore(0)
        self.under_way = asyncio.Event()
        self.failed = asyncio.Event()

    async def put(self, rollouts: Sequence[StoredRollout]) -> int:
        self.calls.append([(each.slot, len(each.tokens)) for each in rollouts])
        self.under_way.set()
        await self.permits.acquire()
        self.under_way.clear()
        if self.fails:
            self.available = False
            self.failed.set()
            return 0
        return len(rollouts)


class Counts:
    def __init__(self) -> None:
        self.put_calls: list[tuple[int, int, int]] = []

    def put(self, rollouts: int, stored: int, tokens: int) -> None:
        self.put_calls.append((rollouts, stored, tokens))


async def test_one_call_is_under_way_and_the_latest_of_a_sample_wins() -> None:
    store, counts = Store(), Counts()
    queue = UploadQueue(store, counts)  # type: ignore[arg-type]
    running = asyncio.create_task(queue.run())
    queue.add([rollout(0, [1])])
    await asyncio.wait_for(store.under_way.wait(), WAIT)
    queue.add([rollout(0, [1, 2])])
    queue.add([rollout(0, [1, 2, 3]), rollout(1, [1])])
    store.permits.release()
    store.permits.release()
    await asyncio.wait_for(queue.sent(WAIT), WAIT)
    assert store.calls == [[(0, 1)], [(0, 3), (1, 1)]]
    assert counts.put_calls == [(1, 1, 1), (2, 2, 4)]
    running.cancel()


async def test_sent_means_that_the_last_call_was_answered() -> None:
    store = Store()
    queue = UploadQueue(store, Counts())  # type: ignore[arg-type]
    running = asyncio.create_task(queue.run())
    queue.add([rollout()])
    await asyncio.wait_for(store.under_way.wait(), WAIT)
    assert queue.tokens == 0
    waiting = asyncio.create_task(queue.sent(WAIT))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    store.permits.release()
    await asyncio.wait_for(waiting, WAIT)
    running.cancel()


async def test_nobody_waits_for_a_store_that_is_away_or_hangs() -> None:
    store = Store()
    queue = UploadQueue(store, Counts())  # type: ignore[arg-type]
    running = asyncio.create_task(queue.run())
    queue.add([rollout()])
    await asyncio.wait_for(store.under_way.wait(), WAIT)
    await asyncio.wait_for(queue.sent(0.01), WAIT)
    store.available = False
    await asyncio.wait_for(queue.sent(1e6), WAIT)
    running.cancel()


async def test_what_could_not_be_sent_waits_unless_something_newer_does() -> None:
    store = Store()
    store.fails = True
    queue = UploadQueue(store, Counts())  # type: ignore[arg-type]
    running = asyncio.create_task(queue.run())
    queue.add([rollout(0, [1]), rollout(1, [1])])
    await asyncio.wait_for(store.under_way.wait(), WAIT)
    queue.add([rollout(0, [1, 2])])
    store.permits.release()
    await asyncio.wait_for(store.failed.wait(), WAIT)
    store.fails, store.available = False, True
    store.permits.release()
    await asyncio.wait_for(queue.sent(WAIT), WAIT)
    assert store.calls == [[(0, 1), (1, 1)], [(0, 2), (1, 1)]]
    running.cancel()


async def test_the_oldest_give_way_when_too_much_waits() -> None:
    store, counts = Store(), Counts()
    store.available = False
    queue = UploadQueue(store, counts, most_tokens=10)  # type: ignore[arg-type]
    queue.add([rollout(slot, [1] * 4) for slot in range(4)])
    assert queue.tokens == 8
    assert counts.put_calls == [(1, 0, 4), (1, 0, 4)]
    queue.add([rollout(9, [1] * 11)])
    assert queue.tokens == 0
    store.available = True
    await asyncio.wait_for(queue.sent(WAIT), WAIT)


@given(sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), max_size=40))
def test_what_waits_is_bounded_and_of_each_sample_the_latest(sizes: list[tuple[int, int]]) -> None:
    async def play() -> None:
        store = Store()
        store.available = False
        queue = UploadQueue(store, Counts(), most_tokens=50)  # type: ignore[arg-type]
        for slot, length in sizes:
            queue.add([rollout(slot, [1] * length)])
            assert queue.tokens <= 50
        store.available = True
        running = asyncio.create_task(queue.run())
        for _ in range(3):
            store.permits.release()
        await asyncio.wait_for(queue.sent(WAIT), WAIT)
        running.cancel()
        latest = dict(sizes)
        sent = dict(pair for call in store.calls for pair in call)
        assert sent.items() <= latest.items()
        if sizes:
            assert sizes[-1][0] in sent

    asyncio.run(play())


# -- the way to the coordinator ---------------------------------------------------------------------------


class Known:
    """A registry that says what it is told to."""

    def __init__(self, *records: InstanceRecord, error: Exception | None = None) -> None:
        self.records = records
        self.error = error

    async def list(self, service: str) -> Mapping[str, InstanceRecord]:
        assert service == SERVICE
        if self.error is not None:
            raise self.error
        return {record.instance_id: record for record in self.records}


class Named(rpc.BubbleServiceServicer):
    """Answers with its own name, or with an error."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    async def PollWork(self, request: pb.PollWorkRequest, context: Any) -> pb.PollWorkResponse:
        if request.room == 0:
            await context.abort(grpc.StatusCode.INTERNAL, "a defect")
        return pb.PollWorkResponse(coordinator_epoch=self.epoch)


@asynccontextmanager
async def serving(epoch: int) -> Any:
    server = grpc.aio.server()
    rpc.add_BubbleServiceServicer_to_server(Named(epoch), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield InstanceRecord(SERVICE, f"c-{epoch}", address=f"127.0.0.1:{port}", registered_at=epoch)
    await server.stop(0)


def way_to(registry: Known) -> CoordinatorConnection:
    return CoordinatorConnection(ServiceConfig(), registry)  # type: ignore[arg-type]


async def test_the_coordinator_that_registered_last_is_polled_until_it_fails() -> None:
    async with serving(1) as old, serving(2) as young:
        registry = Known(young, old)
        way = way_to(registry)
        await way.find()
        assert (await way.poll(pb.PollWorkRequest(room=1), WAIT)).coordinator_epoch == 2
        registry.records = (old,)
        await way.find()
        assert (await way.poll(pb.PollWorkRequest(room=1), WAIT)).coordinator_epoch == 2
        with pytest.raises(CoordinatorGone, match="INTERNAL: a defect"):
            await way.poll(pb.PollWorkRequest(room=0), WAIT)
        await way.leave()
        await way.find()
        assert (await way.poll(pb.PollWorkRequest(room=1), WAIT)).coordinator_epoch == 1
        await way.leave()


@pytest.mark.parametrize(
    ("registry", "reason"),
    [
        (Known(), "none is registered"),
        (Known(error=ConnectionError("away")), "the registry cannot be read: away"),
    ],
)
async def test_without_a_coordinator_the_reason_is_told(registry: Known, reason: str) -> None:
    with pytest.raises(CoordinatorGone, match=reason):
        await way_to(registry).find()


async def test_a_coordinator_that_is_dead_is_gone() -> None:
    # Nobody listens, and nobody else gets the port.
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        way = way_to(Known(InstanceRecord(SERVICE, "c-1", address=address)))
        await way.find()
        with pytest.raises(CoordinatorGone, match="UNAVAILABLE"):
            await way.poll(pb.PollWorkRequest(room=1), WAIT)
        await way.leave()
