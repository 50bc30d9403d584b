"""Weight updates over several instances: all or the well ones, with one that fails, is lost, or disagrees."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from redis.exceptions import ConnectionError as RedisDown

from paceline.columns import VersionMark
from paceline.internal.v1 import generation_pb2, generation_pb2_grpc
from paceline.v1 import sample_pb2, weight_pb2
from services.contracts.errors import (
    KEEPING_KV,
    Aborted,
    DataLoss,
    FailedPrecondition,
    NotFound,
    ServiceError,
    Unavailable,
)
from services.gateway.config import GatewayConfig
from services.gateway.instances import connection as connection_module
from services.gateway.instances.connection import Connection
from services.gateway.instances.updater import InFlightSamples, Updater
from services.gateway.journal import fenced_records
from services.gateway.scheduler.turns import Pace
from services.gateway.state.fleet_health import MemberState
from services.gateway.state.messages import final_sample
from services.gateway.state.update_book import (
    InFlightTreatment,
    PublishedVersion,
    UpdateBook,
    UpdatePhase,
    WeightUpdate,
)
from services.platform.tasks import Notifier, end
from tests.unit.gateway.fake_engine import FakeEngine, rpc_error
from tests.unit.gateway.scheduler_parts import (
    VERSION,
    RecordingLink,
    SchedulerParts,
    a_batch,
    finished,
    tokens,
    turn,
)

DISK = weight_pb2.DiskWeights(path="/weights/8")
NEW = VERSION + 1


def versioned(handle: int, version: int, *values: int) -> generation_pb2.WorkResponse:
    """Return a message with new tokens of a sample that this version sampled."""
    response = tokens(handle, *values)
    response.deltas[0].tokens.versions.add(tokens=len(values), policy_version=version)
    return response


class RecordingStore:
    """Keeps what was saved as (published version, phase); `down` makes the next saves fail."""

    def __init__(self) -> None:
        self.saved: list[tuple[int, str]] = []
        self.down = 0

    async def save(self, book: UpdateBook) -> None:
        if self.down:
            self.down -= 1
            raise RedisDown("no Redis")
        self.saved.append((book.version or 0, book.active.phase.value if book.active else ""))


class RecordingRoster:
    """The connections of a test, and what became of them."""

    def __init__(self) -> None:
        self.connections: dict[str, Connection] = {}
        self.changed = Notifier()
        self.pace = Pace()
        self.confirmed: list[tuple[str, int]] = []
        self.quarantined: dict[str, str] = {}
        self.recycled: list[str] = []

    def live(self) -> list[Connection]:
        return [each for each in self.connections.values() if not each.gone.is_set()]

    async def settled(self) -> None: ...

    def confirm(self, connection: Connection, version: int, *, updated: bool) -> None:
        assert updated, "confirmed by a completed update"
        connection.member.state = MemberState.SERVING
        self.confirmed.append((connection.instance_id, version))

    def quarantine(self, connection: Connection, reason: str) -> None:
        self.quarantined[connection.instance_id] = reason

    def notify(self, *, changed: bool = False) -> None:
        self.changed.notify()

    def recycle(self, connection: Connection) -> None:
        self.recycled.append(connection.instance_id)


class Updating:
    """An updater with the instances named."""

    def __init__(self, *instance_ids: str, active: WeightUpdate | None = None) -> None:
        self.parts = SchedulerParts()
        self.store, self.roster = RecordingStore(), RecordingRoster()
        self.book = UpdateBook(60.0, PublishedVersion(VERSION), active)
        store: Any = self.store
        roster: Any = self.roster
        samples = InFlightSamples(self.book, self.parts.scheduler, self.parts.metrics)
        self.updater = Updater(
            self.book,
            store,
            self.parts.fleet,
            roster,
            samples,
            self.parts.metrics,
            self.parts.recorded.append,
        )
        self.engines: dict[str, FakeEngine] = {}
        for instance_id in instance_ids:
            self.parts.join(instance_id)
            engine: Any = FakeEngine(instance_id, version=VERSION)
            stub = generation_pb2_grpc.GenerationServiceStub(engine)
            link: Any = None
            member = self.parts.fleet.members[instance_id]
            connection = Connection(GatewayConfig(), member, engine, stub, link, ready=True)
            self.roster.connections[instance_id] = connection
            self.engines[instance_id] = engine

    async def start(self) -> str:
        return (await self.updater.start("run", NEW)).update_id

    async def staged(self) -> str:
        """Start an update and stage it everywhere."""
        update_id = await self.start()
        await self.updater.stage(update_id, DISK)
        return update_id

    async def serves_new(self, link: RecordingLink) -> None:
        """Let an instance serve the new version."""
        self.parts.fleet.confirm(link.instance_id, 1, NEW, 0.0, updated=True)
        link.slots.serve(NEW)
        self.parts.placer.pump_soon()
        await turn()

    def keeps_kv(self, name: str, why: str | None = None) -> None:
        """Say of an instance that it keeps KV over an update, or why not; "": it is of an earlier release."""
        member = self.parts.fleet.members[name]
        refused = {KEEPING_KV: why} if why else {}
        member.record = replace(member.record, keeps_kv=why is None, refused_features=refused)

    def versions(self) -> list[int]:
        return [engine.version for engine in self.engines.values()]

    def outcome(self, name: str) -> float:
        return self.parts.metric("updates_total", outcome=name)


async def test_an_update_is_staged_applied_and_published_everywhere() -> None:
    updating = Updating("a", "b")
    update_id = await updating.staged()
    results = (await updating.updater.finish(update_id)).instances
    assert [(each.instance_id, each.applied, each.policy_version) for each in results] == [
        ("a", True, NEW),
        ("b", True, NEW),
    ]
    assert [(each.checksum, each.stage_time.seconds) for each in results] == [("sum", 2)] * 2
    assert updating.book.published == PublishedVersion(NEW, "/weights/8", "sum", update_id)
    assert (updating.versions(), updating.parts.fleet.published) == ([NEW, NEW], NEW)
    assert updating.roster.confirmed == [("a", NEW), ("b", NEW)]
    # Each phase is on record before it is acted on.
    assert updating.store.saved == [
        (VERSION, "started"),
        (VERSION, "staged"),
        (VERSION, "applying"),
        (NEW, ""),
    ]
    assert updating.outcome("published") == 1
    assert (await updating.updater.finish(update_id)).instances == results
    assert updating.engines["a"].calls == ["StageWeights", "ApplyWeights"]


async def test_an_instance_that_fails_to_apply_is_quarantined_and_the_others_serve() -> None:
    updating = Updating("a", "b")
    update_id = await updating.staged()
    updating.engines["a"].errors["ApplyWeights"] = [rpc_error(grpc.StatusCode.INTERNAL, "out of memory")]
    failed, applied = (await updating.updater.finish(update_id)).instances
    assert (failed.applied, failed.error) == (False, "INTERNAL: out of memory")
    assert (applied.applied, updating.book.version) == (True, NEW)
    assert updating.roster.quarantined == {"a": f"did not apply {NEW}: out of memory"}
    assert updating.roster.confirmed == [("b", NEW)]
    # It is STALE now that another version is published, so it is connected to anew and loads it.
    assert updating.roster.recycled == ["a"]


async def test_an_update_that_no_instance_applied_is_not_published() -> None:
    updating = Updating("a")
    update_id = await updating.staged()
    updating.engines["a"].errors["ApplyWeights"] = [rpc_error(grpc.StatusCode.INTERNAL, "broken")]
    with pytest.raises(FailedPrecondition) as error:
        await updating.updater.finish(update_id)
    assert error.value.reason == "NO_INSTANCE_APPLIED"
    assert (updating.book.version, updating.book.active) == (VERSION, None)
    assert updating.store.saved[-1] == (VERSION, "")
    assert updating.outcome("failed") == 1


async def test_wrong_weights_on_one_instance_end_the_attempt_everywhere() -> None:
    updating = Updating("a", "b")
    update_id = await updating.start()
    updating.engines["b"].errors["StageWeights"] = [
        rpc_error(grpc.StatusCode.INVALID_ARGUMENT, "layer 3 has another shape")
    ]
    with pytest.raises(ServiceError, match="b: layer 3 has another shape") as error:
        await updating.updater.stage(update_id, DISK)
    assert error.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert [engine.staged for engine in updating.engines.values()] == [0, 0]
    assert updating.book.active is not None
    assert updating.book.active.phase is UpdatePhase.STARTED
    # The trainer may correct the path and stage again.
    await updating.updater.stage(update_id, DISK)
    assert updating.book.active.phase is UpdatePhase.STAGED


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS])
async def test_a_refusal_waits_for_no_other_instance(code: grpc.StatusCode) -> None:
    updating = Updating("a", "b", "c")
    update_id = await updating.start()
    for other in ("a", "c"):
        updating.engines[other].gates["StageWeights"] = asyncio.Event()
    updating.engines["b"].errors["StageWeights"] = [rpc_error(code, "layer 3 is wrong")]
    async with asyncio.timeout(60):
        with pytest.raises(ServiceError, match="b: layer 3 is wrong"):
            await updating.updater.stage(update_id, DISK)
    assert [engine.calls[-1] for engine in updating.engines.values()] == ["DiscardWeights"] * 3


@pytest.mark.parametrize("repeats", [1, 2])
async def test_a_staging_that_hangs_can_be_aborted(repeats: int) -> None:
    updating = Updating("a")
    update_id = await updating.start()
    updating.engines["a"].gates["StageWeights"] = asyncio.Event()
    staging = asyncio.create_task(updating.updater.stage(update_id, DISK))
    await updating.engines["a"].called("StageWeights")
    async with asyncio.timeout(60):
        for _ in range(repeats):
            await updating.updater.abort(update_id)
        with pytest.raises(Aborted) as caught:
            await staging
    assert caught.value.code is grpc.StatusCode.ABORTED
    assert (updating.book.active, updating.outcome("aborted")) == (None, 1)
    with pytest.raises(NotFound):
        await updating.updater.abort("another")


async def test_another_push_of_the_same_run_takes_the_place_of_the_one_before() -> None:
    updating = Updating("a")
    first = await updating.updater.start("run", NEW, "push 1", streamed=True)
    assert await updating.updater.start("run", NEW, "push 1", streamed=True) is first
    assert await updating.updater.start("run", NEW, streamed=True) is first, "a client that names no push"
    with pytest.raises(FailedPrecondition, match="is in progress"):
        await updating.updater.start("another run", NEW, "push 2", streamed=True)
    second = await updating.updater.start("run", NEW + 2, "push 2")
    assert (second.version, second.ticket) == (NEW + 2, "")
    assert updating.engines["a"].calls == ["DiscardWeights"]
    await updating.updater.stage(second.update_id, DISK)
    updating.book.applying(second.update_id, 0, 0.0)
    with pytest.raises(FailedPrecondition, match="is in progress"):
        await updating.updater.start("run", NEW + 3, "push 3")


async def test_an_update_that_no_instance_can_take_is_dropped_however_often_it_is_started() -> None:
    updating = Updating()
    update = await updating.updater.start("run", NEW, streamed=True)
    update.touched_at -= 61.0
    for _ in range(2):
        again = await updating.updater.start("run", NEW, streamed=True)
        assert again is not update
        with pytest.raises(Unavailable, match="is gone"):
            await updating.updater.stream_target(again.update_id)
        again.touched_at -= 61.0
        update = again
    assert updating.outcome("abandoned") == 2


async def test_an_unwell_instance_does_not_hold_up_staging_and_is_not_applied_to() -> None:
    updating = Updating("a", "b")
    update_id = await updating.start()
    updating.engines["a"].errors["StageWeights"] = [rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "slow disk")]
    results = await updating.updater.stage(update_id, DISK)
    assert [each.error for each in results] == ["DEADLINE_EXCEEDED: slow disk", ""]
    (applied,) = (await updating.updater.finish(update_id)).instances
    assert (applied.instance_id, updating.versions()) == ("b", [VERSION, NEW])
    assert updating.engines["a"].calls == ["StageWeights"]
    assert updating.roster.recycled == ["a"]


async def test_a_connection_lost_while_it_stages_ends_its_part_at_once() -> None:
    updating = Updating("a", "b")
    update_id = await updating.start()
    updating.engines["a"].gates["StageWeights"] = asyncio.Event()
    staging = asyncio.create_task(updating.updater.stage(update_id, DISK))
    lost = updating.roster.connections["a"]
    await updating.engines["a"].called("StageWeights")
    lost.member.reason = "heartbeat gone"
    lost.gone.set()
    async with asyncio.timeout(60):
        results = await staging
    assert [each.error for each in results] == ["UNAVAILABLE: a was lost: heartbeat gone", ""]
    (applied,) = (await updating.updater.finish(update_id)).instances
    assert applied.instance_id == "b"


async def test_no_instance_that_can_stage_is_unavailable() -> None:
    updating = Updating("a")
    update_id = await updating.start()
    updating.engines["a"].errors["StageWeights"] = [rpc_error(grpc.StatusCode.UNAVAILABLE)]
    with pytest.raises(Unavailable, match="no instance could stage"):
        await updating.updater.stage(update_id, DISK)
    updating.roster.connections["a"].gone.set()
    with pytest.raises(Unavailable, match="no live instance"):
        await updating.updater.stage(update_id, DISK)


async def test_instances_that_read_different_weights_are_data_loss() -> None:
    updating = Updating("a", "b")
    update_id = await updating.start()
    updating.engines["b"].checksum = "another"
    with pytest.raises(DataLoss, match="different weights"):
        await updating.updater.stage(update_id, DISK)
    assert [engine.staged for engine in updating.engines.values()] == [0, 0]


async def test_unfinished_samples_keep_the_old_version() -> None:
    updating = Updating("a")
    update_id = await updating.staged()
    running = updating.parts.scheduler.add(a_batch(2))
    with pytest.raises(FailedPrecondition, match="2 samples of version 7"):
        await updating.updater.finish(update_id)
    assert updating.versions() == [VERSION]
    updating.parts.scheduler.drop(running)
    with updating.parts.batches.reserve(1), pytest.raises(FailedPrecondition, match="1 samples"):
        await updating.updater.finish(update_id)
    await updating.updater.finish(update_id)
    assert updating.versions() == [NEW]


async def test_samples_go_on_under_the_new_version_wherever_they_are() -> None:
    updating = Updating("a")
    link, other = updating.parts.link("b", room=1), updating.parts.link("c", room=0)
    update_id = await updating.staged()
    running = updating.parts.scheduler.add(a_batch(3))
    await turn()
    (item,) = link.items
    updating.parts.events.responded(link, versioned(item.handle, VERSION, 5, 6))
    gate = updating.engines["a"].gates["ApplyWeights"] = asyncio.Event()
    finishing = asyncio.create_task(updating.updater.finish(update_id, InFlightTreatment.CONTINUE))
    await updating.engines["a"].called("ApplyWeights")
    # One instance applies: nothing is placed, and tokens are of the version that the instance says.
    link.slots.room = 8
    updating.parts.placer.pump_soon()
    await turn()
    assert len(link.items) == 1
    updating.parts.events.responded(link, versioned(item.handle, NEW, 7, 8))
    updating.parts.events.responded(link, versioned(item.handle, NEW, 9))
    gate.set()
    finished_update = await finishing
    assert (finished_update.continued, finished_update.aborted) == (3, 0)
    assert updating.engines["a"].in_flight == [weight_pb2.IN_FLIGHT_CONTINUE]
    assert updating.book.published == PublishedVersion(NEW, "/weights/8", "sum", update_id, VERSION)
    batch = running.batch
    marks = [VersionMark(0, VERSION), VersionMark(2, NEW)]
    assert [each.columns.versions for each in batch.samples if each.tokens] == [marks]
    # What waits is for instances with the new version, and so is what is lost.
    await turn()
    assert len(link.items) == 1, "it has the old version"
    await updating.serves_new(link)
    assert [each.policy_version for each in link.items] == [VERSION, NEW, NEW]
    updating.parts.events.link_lost(link, "gone")
    other.slots.room = 8
    await updating.serves_new(other)
    assert sorted(list(each.prefix_token_ids) for each in other.items) == [[], [], [5, 6, 7, 8]]
    assert {each.policy_version for each in other.items} == {NEW}
    assert updating.parts.metric("in_flight_samples_total", outcome="continued") == 3


async def test_samples_that_keep_their_kv_are_marked_until_another_instance_resumes_them() -> None:
    updating = Updating("a")
    link, other = updating.parts.link("b", room=1), updating.parts.link("c", room=0)
    updating.keeps_kv("a")
    update_id = await updating.staged()
    running = updating.parts.scheduler.add(a_batch(1))
    await turn()
    (item,) = link.items
    updating.parts.events.responded(link, versioned(item.handle, VERSION, 5, 6))
    finished_update = await updating.updater.finish(update_id, InFlightTreatment.KEEP_KV)
    assert (finished_update.continued, finished_update.instances[0].kept_samples) == (1, 4)
    assert updating.engines["a"].in_flight == [weight_pb2.IN_FLIGHT_KEEP_KV]
    kept = versioned(item.handle, NEW, 7, 8)
    kept.deltas[0].tokens.versions[0].mixed_kv = True
    updating.parts.events.responded(link, kept)
    updating.parts.events.link_lost(link, "gone")
    other.slots.room = 8
    await updating.serves_new(other)
    updating.parts.events.responded(other, versioned(other.items[0].handle, NEW, 9))
    updating.parts.events.responded(other, finished(other.items[0].handle, sample_pb2.FINISH_REASON_STOP))
    sample = final_sample(running.batch, running.batch.endings[0])
    # The last token of a lost sample is sampled again.
    assert [(s.tokens, s.policy_version, s.mixed_kv) for s in sample.tokens.versions] == [
        (2, VERSION, False), (1, NEW, True), (1, NEW, False)
    ]  # fmt: skip
    assert not sample.provenance.lossless


@pytest.mark.parametrize("why", ["KV is fp8", ""])
async def test_an_update_does_not_keep_kv_where_an_instance_cannot(why: str) -> None:
    updating = Updating("a", "b")
    updating.keeps_kv("a")
    updating.keeps_kv("b", why=why)
    update_id = await updating.staged()
    updating.parts.scheduler.add(a_batch(2))
    with pytest.raises(FailedPrecondition) as refused:
        await updating.updater.finish(update_id, InFlightTreatment.KEEP_KV)
    assert refused.value.reason == "KV_NOT_KEPT"
    for part in ("in_flight: KEEP_KV", "instance b", why or "release", "CONTINUE or ABORT"):
        assert part in refused.value.message
    # Nothing was applied, and the weights are still staged.
    assert updating.versions() == [VERSION, VERSION]
    assert (await updating.updater.finish(update_id, InFlightTreatment.CONTINUE)).continued == 2
    assert updating.versions() == [NEW, NEW]


async def test_samples_that_are_aborted_end_with_the_tokens_they_have() -> None:
    updating = Updating("a")
    link = updating.parts.link("b", room=1)
    update_id = await updating.staged()
    running = updating.parts.scheduler.add(a_batch(3))
    await turn()
    (item,) = link.items
    updating.parts.events.responded(link, versioned(item.handle, VERSION, 5, 6))
    finished_update = await updating.updater.finish(update_id, InFlightTreatment.ABORT)
    assert (finished_update.continued, finished_update.aborted) == (0, 3)
    assert link.aborted == [item.handle], "the instance is asked to end its own"
    updating.parts.events.responded(link, versioned(item.handle, VERSION, 7))
    updating.parts.events.responded(link, finished(item.handle, sample_pb2.FINISH_REASON_ABORTED))
    assert updating.parts.batches.unfinished == 0
    endings = running.batch.endings
    assert {each.status for each in endings} == {sample_pb2.SAMPLE_STATUS_ABORTED}
    found = [final_sample(running.batch, each) for each in endings]
    assert sorted(list(each.tokens.token_ids) for each in found) == [[], [], [5, 6, 7]]
    assert (updating.book.version, updating.engines["a"].in_flight) == (NEW, [weight_pb2.IN_FLIGHT_REFUSE])


async def test_samples_go_on_under_the_old_version_if_nobody_applied() -> None:
    updating = Updating("a")
    link = updating.parts.link("b")
    update_id = await updating.staged()
    updating.engines["a"].errors["ApplyWeights"] = [rpc_error(grpc.StatusCode.INTERNAL, "broken")]
    running = updating.parts.scheduler.add(a_batch(2))
    with pytest.raises(FailedPrecondition, match="no instance applied"):
        await updating.updater.finish(update_id, InFlightTreatment.CONTINUE)
    await turn()
    assert running.batch.current_version == VERSION
    assert [each.policy_version for each in link.items] == [VERSION] * 2


async def test_a_half_applied_update_takes_its_samples_along() -> None:
    for treatment, going_on in ((InFlightTreatment.CONTINUE, 2), (InFlightTreatment.ABORT, 0)):
        left = WeightUpdate("u", "run", NEW, UpdatePhase.APPLYING, 0.0, "/weights/8", "sum", treatment)
        updating = Updating("a", active=left)
        link = updating.parts.link("b")
        running = updating.parts.scheduler.add(a_batch(2))
        await turn()
        assert link.items == [], "an instance may have either version"
        changed = updating.roster.changed.next_change()
        task = asyncio.create_task(updating.updater.run())
        async with asyncio.timeout(60):
            await changed.wait()
        await updating.serves_new(link)
        await end([task])
        assert [each.policy_version for each in link.items] == [NEW] * going_on
        assert running.batch.unfinished == going_on


async def test_an_update_is_applied_only_once_that_is_on_record() -> None:
    updating = Updating("a")
    update_id = await updating.staged()
    updating.store.down = 1
    with pytest.raises(RedisDown):
        await updating.updater.finish(update_id)
    assert updating.book.active is not None
    assert (updating.book.active.phase, updating.versions()) == (UpdatePhase.STAGED, [VERSION])
    await updating.updater.finish(update_id)
    assert updating.versions() == [NEW]


async def test_a_published_version_is_saved_until_redis_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fenced_records, "_SAVE_DELAY", 0.001)
    updating = Updating("a")
    update_id = await updating.staged()
    updating.engines["a"].gates["ApplyWeights"] = asyncio.Event()
    finishing = asyncio.create_task(updating.updater.finish(update_id))
    await updating.engines["a"].called("ApplyWeights")
    updating.store.down = 2
    updating.engines["a"].gates["ApplyWeights"].set()
    async with asyncio.timeout(60):
        await finishing
    assert updating.store.saved[-1] == (NEW, "")


async def test_applying_goes_on_when_its_trainer_goes_away() -> None:
    updating = Updating("a")
    update_id = await updating.staged()
    gate = updating.engines["a"].gates["ApplyWeights"] = asyncio.Event()
    finishing = asyncio.create_task(updating.updater.finish(update_id))
    await updating.engines["a"].called("ApplyWeights")
    await end([finishing])
    changed = updating.roster.changed.next_change()
    gate.set()
    async with asyncio.timeout(60):
        await changed.wait()
    assert (updating.book.version, updating.versions()) == (NEW, [NEW])


async def test_an_instance_that_is_still_ending_samples_is_told_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_module, "_SETTLE_PAUSE", 0.001)
    updating = Updating("a")
    update_id = await updating.staged()
    busy = rpc_error(grpc.StatusCode.FAILED_PRECONDITION, "1 sample is running")
    updating.engines["a"].errors["ApplyWeights"] = [busy, busy]
    (applied,) = (await updating.updater.finish(update_id)).instances
    assert (applied.applied, updating.engines["a"].calls.count("ApplyWeights")) == (True, 3)


async def test_an_aborted_update_is_forgotten_and_its_weights_discarded() -> None:
    updating = Updating("a")
    update_id = await updating.staged()
    await updating.updater.abort(update_id)
    assert (updating.book.active, updating.engines["a"].staged) == (None, 0)
    assert (updating.store.saved[-1], updating.outcome("aborted")) == ((VERSION, ""), 1)
    with pytest.raises(NotFound):
        await updating.updater.finish(update_id)


async def test_an_update_whose_trainer_went_silent_gives_way_to_the_next() -> None:
    updating = Updating("a")
    first = await updating.staged()
    assert updating.book.active is not None
    with pytest.raises(FailedPrecondition):
        await updating.updater.start("another run", NEW)
    updating.book.active.touched_at -= 61.0
    second = await updating.start()
    assert second != first
    assert (updating.outcome("abandoned"), updating.engines["a"].staged) == (1, 0)


async def test_a_half_applied_update_of_a_former_gateway_goes_forward() -> None:
    updating = Updating("a", "b")
    updating.book.active = WeightUpdate("u", "run", NEW, UpdatePhase.APPLYING, 0.0, "/weights/8", "sum")
    changed = updating.roster.changed.next_change()
    task = asyncio.create_task(updating.updater.run())
    async with asyncio.timeout(60):
        await changed.wait()
    await end([task])
    assert updating.book.published == PublishedVersion(NEW, "/weights/8", "sum", "u")
    # Some may have it already; all are connected to anew, and load it unless they do.
    assert updating.roster.recycled == ["a", "b"]


async def test_an_update_that_cannot_be_recorded_is_not_started() -> None:
    updating = Updating("a")
    updating.store.down = 1
    with pytest.raises(RedisDown):
        await updating.start()
    assert updating.book.active is None
