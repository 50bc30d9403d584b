"""Pushes after one that ended badly: its trainer died in some phase, or its weights were refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import paceline
from paceline.cli.app import run
from paceline.v1 import weight_pb2, weight_pb2_grpc, weight_stream_pb2
from paceline.weights import safetensors
from paceline.weights.pieces import cut
from paceline.weights.stream import WeightSender
from services.generation.weights import staging
from services.generation.weights.files import FileContent, WeightFile
from services.generation.weights.stream.reception import Reception
from services.generation.weights.stream.stored_stream import StoredStream
from tests.unit.gateway.stream_fleet import NEW, STREAM, WAIT, StreamFleet, Tensors, stream_fleet, until


def receiving(folder: Path) -> list[Path]:
    """Return the folders of instances that hold what was received in part."""
    return list(folder.glob("*/.receiving*"))


async def send_all(fleet: StreamFleet) -> paceline.UpdateStarted:
    """Send all bytes of an update, as a trainer does before it asks whether they are staged."""
    started = await fleet.client.start_stream("run", NEW, push_id="doomed")
    await until(lambda: len(receiving(fleet.folder)) == 2, "the instances know of the update")
    pieces = cut(safetensors.lay_out(Tensors(), STREAM.shard_bytes), STREAM.piece_bytes)
    channel = fleet.client.dial(started.address)
    sender = WeightSender(pieces, STREAM.window_bytes, WAIT)
    await asyncio.to_thread(sender.send, channel, started.ticket)
    channel.close()
    return started


async def die_waiting(fleet: StreamFleet, update_id: str) -> None:
    """Call UpdateWeights as a trainer does that is killed while one of two instances has staged the weights."""
    first, second = fleet.nodes
    streamed = weight_pb2.UpdateWeightsRequest(update_id=update_id, streamed=weight_pb2.StreamedWeights())
    async with grpc.aio.insecure_channel(fleet.client.address) as channel:
        stub: Any = weight_pb2_grpc.WeightServiceStub(channel)
        await until(lambda: first.checked, "one instance has staged the weights")
        active = fleet.updater.book.active
        assert active is not None
        active.touched_at = 0.0
        call = stub.UpdateWeights(iter([streamed]), timeout=WAIT)
        await until(lambda: active.touched_at, "the call waits for the other instance")
        call.cancel()
    assert second.checked is None


@pytest.mark.parametrize("waited", [False, True], ids=["sent", "waited"])
async def test_a_restarted_trainer_pushes_other_weights_under_its_run_at_once(
    tmp_path: Path, waited: bool
) -> None:
    async with stream_fleet(tmp_path, 2) as fleet:
        fleet.nodes[1].gate.clear()
        doomed = await send_all(fleet)
        if waited:
            await die_waiting(fleet, doomed.update_id)
        fleet.nodes[1].gate.set()
        finished = await fleet.push(Tensors(seed=5))
        assert [each.applied for each in finished.instances] == [True, True]
        fleet.check(fleet.nodes, seed=5)


async def test_a_call_that_is_cancelled_leaves_what_is_staged_to_the_one_that_repeats_it(
    tmp_path: Path,
) -> None:
    async with stream_fleet(tmp_path, 2) as fleet:
        fleet.nodes[1].gate.clear()
        started = await send_all(fleet)
        await die_waiting(fleet, started.update_id)
        again = await fleet.client.start_stream("run", NEW, push_id="doomed")
        assert (again.update_id, again.ticket) == (started.update_id, started.ticket)
        fleet.nodes[1].gate.set()
        await fleet.client.update_streamed(started.update_id, "")
        await fleet.client.finish_update(started.update_id)
        fleet.check(fleet.nodes)


async def test_a_staging_that_hangs_is_aborted_and_who_waits_for_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with stream_fleet(tmp_path, 2) as fleet:

        async def abort(*options: str) -> str:
            address = f"--address={fleet.client.address}"
            assert await asyncio.to_thread(run, ["weights", "abort", address, *options]) == 0
            return capsys.readouterr().out

        assert "no weight update is in progress; version 7 is served" in await abort()
        fleet.nodes[1].gate.clear()
        pushing = asyncio.create_task(fleet.push(Tensors()))
        await until(lambda: fleet.nodes[0].checked, "one instance has staged the weights")
        update_id = (await fleet.client.versions()).update_id
        for options in ((), (f"--update={update_id}",)):
            assert f"update {update_id} is aborted; version 7 is served" in await abort(*options)
        with pytest.raises(paceline.PacelineError) as caught:
            await pushing
        assert caught.value.code in (grpc.StatusCode.ABORTED, grpc.StatusCode.NOT_FOUND)
        fleet.nodes[1].gate.set()
        assert (await fleet.push(Tensors(seed=5))).policy_version == NEW


class WithNan(Tensors):
    """A model with a value that is no number."""

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if name == "w3":
            found[7] = np.nan
        return found


@pytest.fixture
def late_follower(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no instance have more than half of the weights before the first one has refused them."""
    refused = threading.Event()
    read, refuse = StoredStream.read, Reception.refuse

    def late(self: StoredStream, position: int, most: int) -> weight_stream_pb2.WeightPiece:
        if "i0" in self.folder.parts and position > 600_000:
            assert refused.wait(WAIT)
        return read(self, position, most)

    def noted(self: Reception, error: Any) -> None:
        refuse(self, error)
        refused.set()

    monkeypatch.setattr(StoredStream, "read", late)
    monkeypatch.setattr(Reception, "refuse", noted)
    yield
    refused.set()


@pytest.mark.usefixtures("late_follower")
@pytest.mark.parametrize("damaged", [False, True], ids=["nan", "damaged"])
async def test_refused_weights_are_refused_everywhere_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    plain = staging.read_content

    def damage(shard: WeightFile, *rest: Any, **named: Any) -> Any:
        found = plain(shard, *rest, **named)
        return FileContent("0" * 64, found.largest) if "i0" in shard.path.parts else found

    async with stream_fleet(tmp_path, 3) as fleet:
        if damaged:
            monkeypatch.setattr(staging, "read_content", damage)
        expected = paceline.DataLossError if damaged else paceline.InvalidArgumentError
        # The trainer learns it from i0, to which it pushes, or from the gateway: whichever is first.
        text = r"\bi0\b.*is corrupt" if damaged else r"w3.*1 values that are NaN or infinite"
        with pytest.raises(expected, match=text):
            await fleet.push(Tensors() if damaged else WithNan())
        # A follower that was still waiting for bytes has nothing left either.
        await until(lambda: not receiving(tmp_path), "what was received is removed")
        monkeypatch.setattr(staging, "read_content", plain)
        assert (await fleet.push(Tensors(seed=5))).policy_version == NEW
        fleet.check(fleet.nodes, seed=5)
