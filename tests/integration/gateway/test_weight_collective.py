"""Weights that a trainer broadcasts to ranks on the instances, whoever dies or is slow meanwhile."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import paceline
from paceline import WeightCollective
from paceline.v1.weight_pb2 import CollectiveRendezvous
from services.contracts.errors import ResourceExhausted
from services.generation.weights.stream.broadcast_receiver import BroadcastReceiver
from services.generation.weights.stream.broadcasts import ReceiverProcess
from services.generation.weights.stream.stored_stream import StoredStream
from tests.unit.gateway.scheduler_parts import VERSION
from tests.unit.gateway.stream_fleet import (
    COUNT,
    NEW,
    SIZE,
    WAIT,
    StreamFleet,
    Tensors,
    WeightNode,
    stream_fleet,
    until,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

# A limit beyond that of every test: whoever waits for one that is gone until it is over fails.
COLLECTIVE = WeightCollective(
    host="127.0.0.1",
    bucket_bytes=1 << 16,
    window_bytes=1 << 18,
    shard_bytes=600_000,
    join_seconds=50.0,
    stall_seconds=90.0,
)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def receivers() -> AsyncIterator[list[ReceiverProcess]]:
    """Processes that stay from test to test, since each imports torch."""
    processes = [ReceiverProcess() for _ in range(3)]
    yield processes
    for each in processes:
        await each.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(tmp_path: Path, receivers: list[ReceiverProcess]) -> AsyncIterator[StreamFleet]:
    async with stream_fleet(tmp_path, 0) as fleet:
        for receiver in receivers:
            await fleet.add(receiver=receiver, weight_collective=True)
        yield fleet


def no_longer(folder: Path) -> Callable[[], bool]:
    return lambda: not list(folder.glob("*/.receiving*"))


def signal_to(receiver: ReceiverProcess, number: signal.Signals) -> None:
    assert receiver.pid is not None
    os.kill(receiver.pid, number)


def at_half_of(node: WeightNode, fleet: StreamFleet, work: Callable[[], None]) -> Callable[[], None]:
    """Return a function for the trainer that does something once, when a node has received a part."""

    async def run() -> None:
        await until(lambda: node.received[0] > 0, f"{node.instance_id} receives")
        work()

    return fleet.once(run)


async def test_every_instance_gets_by_broadcast_what_a_folder_would_have(fleet: StreamFleet) -> None:
    finished = await fleet.push(Tensors(), COLLECTIVE)
    assert (finished.policy_version, [each.applied for each in finished.instances]) == (NEW, [True] * 3)
    size = fleet.check(fleet.nodes)
    assert [each.received for each in fleet.nodes] == [(size, 0)] * 3
    published = await fleet.client.versions()
    assert (published.policy_version, published.policy_path) == (NEW, "")


async def test_a_rank_that_dies_in_mid_broadcast_costs_nobody_else_the_update(
    fleet: StreamFleet, receivers: list[ReceiverProcess], tmp_path: Path
) -> None:
    victim = fleet.nodes[1]
    tensors = Tensors(at_half_of(victim, fleet, lambda: signal_to(receivers[1], signal.SIGKILL)))
    # An iterator cannot be read again: what the others lack has to be in the window.
    finished = await fleet.push(((name, tensors[name]) for name in tensors), COLLECTIVE)
    others = [node for node in fleet.nodes if node is not victim]
    fleet.check(others)
    assert [each.instance_id for each in finished.instances if each.applied] == ["i0", "i2"]
    assert victim.checked is None
    await until(no_longer(tmp_path), "what the dead rank had is removed")
    # It catches up from those that have the version, as with every transport.
    checksum = (await fleet.client.versions()).policy_checksum
    await fleet.join(victim, "later", checksum, others)
    fleet.check(fleet.nodes)


async def test_a_rank_that_is_frozen_is_named_and_left_out(
    fleet: StreamFleet, receivers: list[ReceiverProcess], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slow = fleet.nodes[0]
    try:
        freeze = at_half_of(slow, fleet, lambda: signal_to(receivers[0], signal.SIGSTOP))
        finished = await fleet.push(Tensors(freeze), replace(COLLECTIVE, stall_seconds=4.0))
        assert "instance i0 is left out of the weight broadcast" in caplog.text
        assert [each.instance_id for each in finished.instances if each.applied] == ["i1", "i2"]
        fleet.check(fleet.nodes[1:])
        assert slow.version == VERSION
    finally:
        await receivers[0].stop()
    await until(no_longer(tmp_path), "what the frozen rank had is removed")


@pytest.mark.parametrize("kind", ["nan", "shape", "name"])
async def test_wrong_tensors_are_refused_by_name_and_the_old_version_stays(
    fleet: StreamFleet, tmp_path: Path, kind: str
) -> None:
    class Wrong(Tensors):
        def __getitem__(self, name: str) -> Any:
            found = super().__getitem__(name)
            if name == "w3" and kind == "nan":
                found[7] = np.nan
            return found[: SIZE // 2] if name == "w3" and kind == "shape" else found

        def __iter__(self) -> Iterator[str]:
            return (name for name in super().__iter__() if kind != "name" or name != "w3")

    with pytest.raises(paceline.InvalidArgumentError) as error:
        await fleet.push(Wrong(), COLLECTIVE)
    assert [each.field for each in error.value.violations] == ["tensors[w3]"]
    assert {node.version for node in fleet.nodes} == {VERSION}
    assert (await fleet.client.versions()).update_id == ""
    # Nothing of it is in the way of the next one.
    assert (await fleet.push(Tensors(seed=2), COLLECTIVE)).policy_version == NEW
    fleet.check(fleet.nodes, seed=2)


async def test_a_second_push_is_refused_while_one_is_in_progress(fleet: StreamFleet) -> None:
    refusals = []

    async def push() -> None:
        try:
            await fleet.client.run("other", weights=COLLECTIVE).push_weights(Tensors(seed=9))
        except paceline.FailedPreconditionError as error:
            refusals.append(error.reason)

    await fleet.push(Tensors(fleet.once(push)), COLLECTIVE)
    assert refusals == ["UPDATE_IN_PROGRESS"]
    fleet.check(fleet.nodes)


async def test_tensors_that_end_in_an_error_end_the_push_with_it(fleet: StreamFleet, tmp_path: Path) -> None:
    def fail() -> None:
        raise ConnectionError("the optimizer is gone")

    with pytest.raises(ConnectionError, match="the optimizer is gone"):
        await fleet.push(Tensors(fail), COLLECTIVE)
    await until(no_longer(tmp_path), "what was received is removed")
    assert (await fleet.client.versions()).update_id == ""


async def test_a_trainer_that_dies_leaves_the_old_version_and_ends_every_rank(
    tmp_path: Path, receivers: list[ReceiverProcess]
) -> None:
    async with stream_fleet(tmp_path, 0, update_timeout=1.0) as fleet:
        for receiver in receivers[:2]:
            await fleet.add(receiver=receiver, weight_collective=True)
        code = f"""
import os, signal, sys, numpy as np, paceline
def tensors():
    for number in range({COUNT}):
        if number == {COUNT // 2}:
            sys.stdout.write("half\\n"); sys.stdout.flush()
            sys.stdin.readline()
        yield f"w{{number}}", np.full({SIZE}, number, np.float32)
weights = paceline.WeightCollective(
    host="127.0.0.1", bucket_bytes=1 << 16, window_bytes=1 << 18, join_seconds=50, stall_seconds=90
)
client = paceline.Client({fleet.client.address!r})
client.run("doomed", weights=weights).push_weights(tensors())
"""
        trainer = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert trainer.stdout is not None
            lines = [await asyncio.wait_for(trainer.stdout.readline(), 60)]
            while lines[-1] not in (b"half\n", b""):
                lines.append(await asyncio.wait_for(trainer.stdout.readline(), 60))
            assert lines[-1] == b"half\n"
            await until(lambda: all(node.received[0] for node in fleet.nodes), "all receive")
        finally:
            trainer.kill()
            await trainer.wait()
        await until(no_longer(tmp_path), "every rank has ended, and what it had is removed")
        await until(lambda: fleet.updater.book.active is None, "the update is dropped")
        assert {node.version for node in fleet.nodes} == {VERSION}
        assert (await fleet.push(Tensors(seed=5), COLLECTIVE)).policy_version == NEW
        fleet.check(fleet.nodes, seed=5)


class ThreadReceiver(ReceiverProcess):
    """Takes broadcasts in a thread of this process, where a test can make its disk fail."""

    async def receive(
        self, order: Mapping[str, Any], silence_seconds: float, progress: Callable[[int], None]
    ) -> dict[str, Any]:
        described = CollectiveRendezvous.FromString(base64.b64decode(order["rendezvous"]))
        folder = Path(order["folder"])
        most = int(order["most_bytes"])
        rank = BroadcastReceiver(described, order["instance_id"], folder, most, lambda report: None)
        return await asyncio.to_thread(rank.receive)


async def test_a_disk_that_is_full_at_the_last_byte_costs_nobody_else_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete, put = threading.Event(), StoredStream.put

    def put_but_the_last(stored: StoredStream, piece: Any) -> None:
        if piece.last and stored.folder.parent == tmp_path / "i1":
            assert complete.wait(WAIT)
            raise ResourceExhausted("disk", "there is no room for the last byte")
        put(stored, piece)
        if piece.last:
            complete.set()

    monkeypatch.setattr(StoredStream, "put", put_but_the_last)
    async with stream_fleet(tmp_path, 0) as fleet:
        for _ in range(2):
            await fleet.add(receiver=ThreadReceiver(), weight_collective=True)
        # The one that has all is ready for no other round, and is not to be waited for.
        finished = await fleet.push(Tensors(), COLLECTIVE)
        assert [each.instance_id for each in finished.instances if each.applied] == ["i0"]
        fleet.check(fleet.nodes[:1])
        await until(no_longer(tmp_path), "what the other had is removed")


async def test_instances_that_do_not_allow_it_say_so(tmp_path: Path) -> None:
    async with stream_fleet(tmp_path, 2) as fleet:
        with pytest.raises(paceline.FailedPreconditionError) as error:
            await fleet.push(Tensors(), COLLECTIVE)
        assert error.value.reason == "COLLECTIVE_NOT_ALLOWED"
        assert (await fleet.client.versions()).update_id == ""


async def test_a_trainer_without_torch_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    async with stream_fleet(tmp_path, 1) as fleet:
        with pytest.raises(
            paceline.FailedPreconditionError, match=r"pip install '\.\[collective\]'"
        ) as error:
            await fleet.push(Tensors(), COLLECTIVE)
        assert error.value.reason == "NO_RENDEZVOUS"


async def test_a_port_that_is_taken_is_named(fleet: StreamFleet) -> None:
    taken = await asyncio.start_server(lambda *_: None, "0.0.0.0", 0)
    async with taken:
        port = taken.sockets[0].getsockname()[1]
        with pytest.raises(paceline.FailedPreconditionError, match=str(port)) as error:
            await fleet.push(Tensors(), replace(COLLECTIVE, port=port))
        assert error.value.reason == "NO_RENDEZVOUS"


async def test_several_shards_are_refused_before_anything_begins(tmp_path: Path) -> None:
    async with stream_fleet(tmp_path / "a", 0) as first, stream_fleet(tmp_path / "b", 0) as second:
        client = paceline.AsyncClient([first.client.address, second.client.address])
        try:
            with pytest.raises(paceline.FailedPreconditionError, match="one shard only") as error:
                await client.run("run", weights=COLLECTIVE).push_weights(Tensors())
        finally:
            await client.close()
        assert error.value.reason == "NO_RENDEZVOUS"
        assert (await first.client.versions()).update_id == ""
