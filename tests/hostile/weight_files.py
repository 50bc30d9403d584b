"""Attacks by files: folders of weights, as a token for weights names them, over gRPC and over HTTP."""

from __future__ import annotations

import json
import os
import socket
import struct
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from paceline.v1 import weight_pb2, weight_pb2_grpc
from tests.hostile.answers import UNANSWERED, Answer, Attack, Expected, either, grpc_answer
from tests.hostile.http_sent import sent
from tests.hostile.rig import MOVER, Rig, token_of

WAIT = 60.0
SHARD, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
REFUSED = either("INVALID_ARGUMENT", "DATA_LOSS", "FAILED_PRECONDITION", 400, 409, 500)
HARMLESS = Expected(REFUSED.statuses | {"OK", "200"})
"""Of what may be passed over."""
Spoil = Callable[[Path, int], None]


def folder_of(rig: Rig) -> Path:
    """Return a new folder with weights that can be served."""
    import torch
    from safetensors.torch import save_file

    from tests.hostile.reading_instance import SHAPE, TENSOR

    folder = rig.files / uuid.uuid4().hex
    folder.mkdir()
    save_file({TENSOR: torch.ones(SHAPE)}, folder / SHARD)
    return folder


def pushed(rig: Rig, folder: Path) -> list[Answer]:
    """Have the instance read a folder, as an update over gRPC that is given up afterwards."""
    metadata = (("authorization", f"Bearer {token_of(MOVER)}"),)
    with grpc.insecure_channel(rig.address("gateway")) as channel:
        stub: Any = weight_pb2_grpc.WeightServiceStub(channel)
        version = stub.GetVersions(
            weight_pb2.GetVersionsRequest(), timeout=WAIT, metadata=metadata
        ).policy_version
        start = weight_pb2.StartUpdateRequest(
            run_id=f"{MOVER}-run", policy_version=version + 1, target=1, transport=1
        )
        update = stub.StartUpdate(start, timeout=WAIT, metadata=metadata).update_id
        try:
            disk = weight_pb2.DiskWeights(path=str(folder))
            part = weight_pb2.UpdateWeightsRequest(update_id=update, disk=disk)
            stub.UpdateWeights(iter([part]), timeout=WAIT, metadata=metadata)
            return [Answer("OK", to="UpdateWeights")]
        except grpc.RpcError as error:
            found = grpc_answer(error, "UpdateWeights")
            return [
                Answer(UNANSWERED, found.message, to=found.to)
                if found.status == "DEADLINE_EXCEEDED"
                else found
            ]
        finally:
            with suppress(grpc.RpcError):
                abort = weight_pb2.AbortUpdateRequest(update_id=update)
                stub.AbortUpdate(abort, timeout=WAIT, metadata=metadata)


def spoilt(name: str, spoil: Spoil) -> Callable[[Rig, int], list[Answer]]:
    """Return what has a folder read one file of which is spoilt, over both doors."""

    def send(rig: Rig, size: int) -> list[Answer]:
        folder = folder_of(rig)
        (folder / name).unlink(missing_ok=True)
        spoil(folder / name, size)
        return [*pushed(rig, folder), *sent("/update_weights_from_disk", MOVER, model_path=str(folder))(rig)]

    return send


def fifo(place: Path, _: int) -> None:
    """A pipe that nobody writes to."""
    os.mkfifo(place)


def endless(place: Path, _: int) -> None:
    """A device that has no end."""
    place.symlink_to("/dev/zero")


def of_the_machine(place: Path, _: int) -> None:
    """A file of the machine's."""
    place.symlink_to("/etc/passwd")


def socket_of(place: Path, _: int) -> None:
    """A socket."""
    here = Path.cwd()
    with socket.socket(socket.AF_UNIX) as listening:
        os.chdir(place.parent)
        try:
            listening.bind(place.name)
        finally:
            os.chdir(here)


def directory(place: Path, _: int) -> None:
    """A folder."""
    place.mkdir()


def sparse(place: Path, gib: int) -> None:
    """A file that is long and empty."""
    with place.open("wb") as file:
        file.truncate(gib << 30)


def lists(place: Path, depth: int) -> None:
    """JSON that is nested."""
    place.write_text("[" * depth)


def objects(place: Path, depth: int) -> None:
    """JSON that is nested in objects."""
    place.write_text('{"weight_map":' * depth)


def header(content: Callable[[int], bytes], length: int | None = None) -> Spoil:
    """A safetensors file with a header, whose length is said to be another one."""

    def write(place: Path, size: int) -> None:
        text = content(size)
        place.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text)

    return write


def tensors(count: int) -> bytes:
    """Return a header of so many empty tensors."""
    empty = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    return ("{" + ",".join(f'"t{number}":{empty}' for number in range(count)) + "}").encode()


def one_tensor(**fields: Any) -> Callable[[int], bytes]:
    """Return what makes a header of one tensor."""
    whole = {"dtype": "F32", "shape": [6, 4], "data_offsets": [0, 96], **fields}
    return lambda _: json.dumps({"model.embed_tokens.weight": whole}).encode()


def behind(spoil: Spoil, content: bytes) -> Spoil:
    """A file with these bytes after what another spoils."""

    def write(place: Path, size: int) -> None:
        spoil(place, size)
        with place.open("ab") as file:
            file.write(content)

    return write


def dimensions(count: int) -> bytes:
    """Return a header of a tensor of so many dimensions."""
    return one_tensor(shape=[1] * count, data_offsets=[0, 4])(0)


def index(text: Callable[[int], str]) -> Spoil:
    """An index with this text."""
    return lambda place, size: void(place.write_text(text(size)))


def void(_: object) -> None:
    """Return nothing."""


def outside(size: int) -> str:
    """Return an index as other programs write it, which names a file elsewhere."""
    return json.dumps(
        {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "../" * size + "etc/passwd"}}
    )


def shards_outside(size: int) -> str:
    """Return an index with checksums, one of a file elsewhere."""
    return json.dumps({"metadata": {"shards": {"../" * size + "etc/passwd": {"sha256": ""}}}})


def adapter(text: Callable[[int], str]) -> Spoil:
    """An adapter's configuration with this text, beside weights of an adapter."""

    def write(place: Path, size: int) -> None:
        (place.parent / SHARD).rename(place.parent / "adapter_model.safetensors")
        place.write_text(text(size))

    return write


def fifo_adapter(place: Path, size: int) -> None:
    """A pipe as an adapter's configuration."""
    (place.parent / SHARD).rename(place.parent / "adapter_model.safetensors")
    fifo(place, size)


SPOILT: list[tuple[str, str, Spoil, Expected, int, int]] = [
    ("FIFO as weights", SHARD, fifo, REFUSED, 1, 1),
    ("FIFO as index", INDEX, fifo, HARMLESS, 1, 1),
    ("FIFO as adapter", ADAPTER, fifo_adapter, HARMLESS, 1, 1),
    ("device as weights", SHARD, endless, REFUSED, 1, 1),
    ("device as index", INDEX, endless, HARMLESS, 1, 1),
    ("socket as weights", SHARD, socket_of, REFUSED, 1, 1),
    ("folder as weights", SHARD, directory, REFUSED, 1, 1),
    ("file of the machine as weights", SHARD, of_the_machine, REFUSED, 1, 1),
    ("sparse file", SHARD, sparse, REFUSED, 1024, 1024),
    ("sparse file beside the weights", "other.safetensors", sparse, REFUSED, 1024, 1024),
    ("header of many tensors", SHARD, header(tensors), REFUSED, 1000, 1_400_000),
    ("header of many dimensions", SHARD, header(dimensions), REFUSED, 20_000, 20_000),
    ("header nested deep", SHARD, header(lambda depth: b"[" * depth), REFUSED, 100_000, 99_000_000),
    (
        "header in objects nested deep",
        SHARD,
        header(lambda depth: b'{"a":' * depth),
        REFUSED,
        100_000,
        6_000_000,
    ),
    ("header longer than the file", SHARD, header(one_tensor(), 1 << 63), REFUSED, 1, 1),
    ("header of a length below none", SHARD, header(one_tensor(), (1 << 64) - 1), REFUSED, 1, 1),
    ("shape of 2**80", SHARD, header(one_tensor(shape=[1 << 40, 1 << 40])), REFUSED, 1, 1),
    ("shape in fractions", SHARD, header(one_tensor(shape=[6.0, 4.5])), REFUSED, 1, 1),
    ("offsets below none", SHARD, header(one_tensor(data_offsets=[-96, 0])), REFUSED, 1, 1),
    (
        "offsets in fractions",
        SHARD,
        behind(header(one_tensor(data_offsets=[0.0, 96.0])), bytes(96)),
        REFUSED,
        1,
        1,
    ),
    (
        "number of 5,000 digits",
        SHARD,
        header(lambda _: b'{"model.embed_tokens.weight":{"dtype":"F32","shape":[' + b"9" * 5000 + b"]}}"),
        REFUSED,
        1,
        1,
    ),
    ("index nested deep", INDEX, lists, REFUSED, 100_000, 1_000_000),
    ("index in objects nested deep", INDEX, objects, REFUSED, 100_000, 1_000_000),
    # Its names are read by nobody: the files that lie there are the weights.
    ("index that names a file elsewhere", INDEX, index(outside), HARMLESS, 12, 12),
    ("checksum of a file elsewhere", INDEX, index(shards_outside), REFUSED, 12, 12),
    ("index that is a list", INDEX, index(lambda _: "[]"), REFUSED, 1, 1),
    ("index that is nothing", INDEX, index(lambda _: "null"), REFUSED, 1, 1),
    ("adapter nested deep", ADAPTER, adapter(lambda depth: "[" * depth), HARMLESS, 100_000, 1_000_000),
]

ATTACKS: list[Attack] = [
    Attack(name, "W1", spoilt(file, spoil), expected, short, whole)
    for name, file, spoil, expected, short, whole in SPOILT
]
