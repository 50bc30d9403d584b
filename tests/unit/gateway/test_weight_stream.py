"""Weights that a trainer pushes to one instance and that go on from one to the next, whoever dies meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

import paceline
from paceline import Adapter, WeightFolder
from paceline.v1 import weight_pb2, weight_stream_pb2
from paceline.weights import expansion, safetensors
from paceline.weights.expansion import BaseWeights
from paceline.weights.pieces import cut
from paceline.weights.stream import WeightSender
from services.generation.engine.types import TensorSpec
from services.generation.weights.adoption import AdoptedWeights
from services.generation.weights.files import WeightFile
from services.generation.weights.stream import reception
from services.generation.weights.stream.stored_stream import StoredStream
from tests.unit.gateway.scheduler_parts import VERSION, a_batch
from tests.unit.gateway.stream_fleet import NEW, STREAM, WAIT, Tensors, stream_fleet, until


async def test_every_byte_leaves_the_trainer_once_and_every_instance_at_most_once(tmp_path: Path) -> None:
    async with stream_fleet(tmp_path, 4) as fleet:
        finished = await fleet.push(Tensors())
        assert (finished.policy_version, [each.applied for each in finished.instances]) == (NEW, [True] * 4)
        size = fleet.check(fleet.nodes)
        assert [each.received for each in fleet.nodes] == [(size, 0), *[(0, size)] * 3]
        published = await fleet.client.versions()
        assert (published.policy_version, published.policy_path) == (NEW, "")


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_an_instance_that_dies_in_mid_stream_costs_nobody_else_the_update(
    tmp_path: Path, place: int
) -> None:
    async with stream_fleet(tmp_path, 3) as fleet:
        victim = fleet.nodes[place]

        async def kill() -> None:
            await until(lambda: sum(victim.received) > 0, "the instance receives")
            await fleet.kill(victim)

        finished = await fleet.push(Tensors(fleet.once(kill)))
        alive = [node for node in fleet.nodes if node is not victim]
        fleet.check(alive)
        applied = {each.instance_id for each in finished.instances if each.applied}
        assert (finished.policy_version, applied) == (NEW, {node.instance_id for node in alive})


async def test_a_trainer_that_dies_in_mid_stream_leaves_nothing_and_blocks_nobody(tmp_path: Path) -> None:
    async with stream_fleet(tmp_path, 0, update_timeout=1.0) as fleet:
        for _ in range(2):
            await fleet.add(weight_idle_seconds=1.0)
        started = await fleet.client.start_stream("doomed", NEW)
        first, second = fleet.nodes
        await until(lambda: len(receiving(tmp_path)) == 2, "the instances know of the update")

        async def die() -> None:
            await until(lambda: sum(second.received) > 0, "the second instance receives")
            raise ConnectionError("the trainer died")

        # Nothing comes of it any more, not even AbortUpdate.
        pieces = cut(safetensors.lay_out(Tensors(fleet.once(die)), STREAM.shard_bytes), STREAM.piece_bytes)
        channel = fleet.client.dial(started.address)
        with pytest.raises(ConnectionError, match="the trainer died"):
            await asyncio.to_thread(
                WeightSender(pieces, STREAM.window_bytes, WAIT).send, channel, started.ticket
            )
        channel.close()
        assert sum(first.received) > 0
        await until(lambda: not receiving(tmp_path), "what was received is removed")
        await until(lambda: fleet.updater.book.active is None, "the update is dropped")
        assert (await fleet.push(Tensors(seed=5))).policy_version == NEW
        fleet.check(fleet.nodes, seed=5)


async def test_a_corrupt_piece_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stream_fleet(tmp_path, 2) as fleet:
        plain, corrupted = StoredStream.read, []

        def read(self: StoredStream, position: int, most: int) -> weight_stream_pb2.WeightPiece:
            piece = plain(self, position, most)
            if position > 100_000 and not corrupted:
                corrupted.append(position)
                piece.data = bytes([piece.data[0] ^ 1]) + piece.data[1:]
            return piece

        monkeypatch.setattr(StoredStream, "read", read)
        await fleet.push(Tensors())
        size = fleet.check(fleet.nodes)
        assert corrupted
        assert fleet.nodes[1].received == (0, size)
        assert fleet.nodes[1].metrics.retries._value.get() >= 1


async def test_an_instance_to_which_only_corrupt_pieces_come_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stream_fleet(tmp_path, 2) as fleet:
        plain = StoredStream.read

        def read(self: StoredStream, position: int, most: int) -> weight_stream_pb2.WeightPiece:
            piece = plain(self, position, most)
            piece.crc ^= position > 100_000
            return piece

        monkeypatch.setattr(StoredStream, "read", read)
        finished = await fleet.push(Tensors())
        fleet.check(fleet.nodes[:1])
        assert [each.instance_id for each in finished.instances] == ["i0"]
        assert fleet.nodes[1].checked is None


def receiving(folder: Path) -> list[Path]:
    """Return the folders of instances that hold what was received in part."""
    return list(folder.glob("*/.receiving*"))


class FullDisk(AdoptedWeights):
    """A place whose second file is on a device without space."""

    def receiving(self, owner: str) -> Path:
        folder = super().receiving(owner)
        safetensors.unfinished_file(folder, 1).symlink_to("/dev/full")
        return folder


@pytest.mark.parametrize("place", [0, 1])
async def test_an_instance_whose_disk_is_full_is_left_out(tmp_path: Path, place: int) -> None:
    async with stream_fleet(tmp_path, 0) as fleet:
        for number in range(3):
            await fleet.add(adopt=FullDisk if number == place else AdoptedWeights)
        finished = await fleet.push(Tensors())
        well = [node for number, node in enumerate(fleet.nodes) if number != place]
        assert {each.instance_id for each in finished.instances if each.applied} == {
            node.instance_id for node in well
        }
        fleet.check(well)
        await until(lambda: not receiving(tmp_path), "what was received is removed")


async def test_when_every_disk_is_full_the_trainer_is_told(tmp_path: Path) -> None:
    async with stream_fleet(tmp_path, 0) as fleet:
        await fleet.add(adopt=FullDisk)
        with pytest.raises(paceline.ResourceExhaustedError, match="No space left on device"):
            await fleet.push(Tensors())
        versions = await fleet.client.versions()
        assert (versions.policy_version, versions.update_id) == (NEW - 1, "")


@pytest.mark.parametrize("restarted", [False, True])
async def test_an_instance_that_joins_later_fetches_from_one_that_has_the_version(
    tmp_path: Path, restarted: bool
) -> None:
    async with stream_fleet(tmp_path, 2) as fleet:
        late, gone = await fleet.add(), fleet.nodes[0]
        connection = fleet.roster.connections.pop(late.instance_id)
        await fleet.push(Tensors())
        fleet.roster.connections[late.instance_id] = connection
        assert late.received == (0, 0)
        published = fleet.updater.book.published
        assert published is not None
        assert published.streamed
        if restarted:
            # They have folders, and nothing else.
            for node in fleet.nodes:
                await node.weights.close()
        await fleet.kill(gone)
        await fleet.join(late, published.update_id, published.checksum, fleet.nodes[:2])
        size = fleet.check([late])
        assert late.received == (0, size)
        # Once there, it is found without asking anybody.
        await late.weights.close()
        await fleet.join(late, published.update_id, published.checksum, [])
        assert late.received == (0, size)


async def test_an_instance_that_joins_fetches_what_the_published_adapter_builds_on(tmp_path: Path) -> None:
    manifest = {"m.weight": TensorSpec("m.weight", (4, 8), "F32")}
    state = {"m.weight": np.arange(32, dtype=np.float32).reshape(4, 8)}
    matrices = {"lora_A": np.ones((1, 8), np.float32), "lora_B": np.full((4, 1), 2, np.float32)}
    async with stream_fleet(tmp_path, 0) as fleet:
        first, late = [await fleet.add(manifest=manifest) for _ in range(2)]
        lost = await fleet.add(manifest=manifest, weight_idle_seconds=0.5)
        connections = dict(fleet.roster.connections)
        for absent in (late, lost):
            del fleet.roster.connections[absent.instance_id]
        await fleet.push(state)
        published = fleet.updater.book.published
        assert published is not None
        weights = WeightFolder(tmp_path / "weights", tmp_path / "model")
        adapter = Adapter(
            {f"base_model.model.m.{name}.weight": matrix for name, matrix in matrices.items()},
            {"r": 1, "lora_alpha": 1},
        )
        folder = weights.write_adapter(NEW + 1, adapter, BaseWeights(NEW, published.checksum))
        source = weight_pb2.DiskWeights(path=str(folder), checksum=expansion.checksum(folder))
        try:
            for node, peers in ((first, []), (late, [first])):
                addresses = [each.server.address for each in peers]
                await connections[node.instance_id].load(NEW + 1, source, addresses)
                assert (node.version, node.checked.checksum) == (NEW + 1, source.checksum)
                assert np.array_equal(node.checked.tensors["m.weight"].numpy(), state["m.weight"] + 2)
            assert late.received[1] > 0
            for addresses in ([], ["127.0.0.1:1"]):
                with pytest.raises(grpc.aio.AioRpcError, match="which the adapter builds on, is not here"):
                    await connections[lost.instance_id].load(NEW + 1, source, addresses)
        finally:
            for connection in connections.values():
                await connection.channel.close()


async def test_instances_that_share_a_folder_do_not_disturb_each_other(tmp_path: Path) -> None:
    async with stream_fleet(tmp_path, 0) as fleet:
        for _ in range(3):
            await fleet.add(folder=tmp_path / "shared")
        assert (await fleet.push(Tensors())).policy_version == NEW
        fleet.check(fleet.nodes)


async def test_a_push_needs_the_ticket_of_its_update(tmp_path: Path) -> None:
    async with stream_fleet(tmp_path, 1) as fleet:
        started = await fleet.client.start_stream("run", NEW)
        assert started.ticket not in repr(started)
        for ticket in ("", "wrong", started.ticket[:-1]):
            channel = fleet.client.dial(started.address)
            with pytest.raises(grpc.RpcError, match="no ticket"):
                await asyncio.to_thread(WeightSender(iter(()), 1, WAIT).send, channel, ticket)
            channel.close()


async def test_an_update_has_the_transport_that_it_was_started_with(tmp_path: Path) -> None:
    async with stream_fleet(tmp_path, 1) as fleet:
        started = await fleet.client.start_stream("run", NEW)
        with pytest.raises(paceline.InvalidArgumentError, match="transport of this update is STREAM"):
            await fleet.client.update_weights(started.update_id, tmp_path)
        with pytest.raises(paceline.FailedPreconditionError, match="is in progress"):
            await fleet.client.start_update("run", NEW)
        await fleet.client.abort_update(started.update_id)


async def test_files_that_are_renamed_while_they_are_read_are_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(file: Path, sha256: str) -> WeightFile:
        raise FileNotFoundError(file)

    monkeypatch.setattr(reception, "open_weight_file", opened)
    async with stream_fleet(tmp_path, 2) as fleet:
        await fleet.push(Tensors())
        fleet.check(fleet.nodes)


async def test_a_reception_that_breaks_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = reception.open_weight_file

    def opened(file: Path, sha256: str) -> WeightFile:
        if "i0" in file.parts:
            raise RuntimeError("broken")
        return plain(file, sha256)

    monkeypatch.setattr(reception, "open_weight_file", opened)
    async with stream_fleet(tmp_path, 2) as fleet:
        finished = await fleet.push(Tensors())
        assert [each.instance_id for each in finished.instances] == ["i1"]
        fleet.check(fleet.nodes[1:])


async def test_unfinished_samples_are_treated_as_with_a_folder(tmp_path: Path) -> None:
    async with stream_fleet(tmp_path, 2) as fleet:
        batch = a_batch(2)
        fleet.parts.scheduler.add(batch)
        run = fleet.client.run("run", weights=STREAM)
        with pytest.raises(paceline.FailedPreconditionError) as caught:
            await run.push_weights(Tensors())
        assert caught.value.reason == "SAMPLES_UNFINISHED"
        received = [node.received for node in fleet.nodes]
        finished = await run.finish_push(in_flight=paceline.InFlight.CONTINUE)
        assert (finished.policy_version, finished.continued_samples) == (NEW, 2)
        assert [node.received for node in fleet.nodes] == received, (
            "weights that are staged are not sent again"
        )
        assert [node.goes_on for node in fleet.nodes] == [True, True]
        fleet.check(fleet.nodes)
        published = fleet.updater.book.published
        assert published is not None
        assert (published.streamed, published.since) == (True, VERSION)


async def test_an_iterator_is_pushed_too(tmp_path: Path) -> None:
    async with stream_fleet(tmp_path, 2) as fleet:
        await fleet.push(iter(Tensors().items()), replace(STREAM, piece_bytes=100_000))
        fleet.check(fleet.nodes)
