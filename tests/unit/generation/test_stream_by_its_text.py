"""A trainer can write the stream of weights from the text of weight_stream.proto alone, without code of ours.

It differs from the SDK's writer in everything that the text leaves open: the header's length, the sizes of pieces.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from paceline.v1.weight_stream_pb2 import WeightPiece
from paceline.weights import safetensors
from services.generation.weights.stream.stored_stream import StoredStream

Files = list[dict[str, np.ndarray]]


def pieces_of(files: Files, piece_bytes: int) -> Iterator[WeightPiece]:
    """Yield the pieces of files, as the text describes them."""
    position = 0
    shards, weight_map = {}, {}

    def cut(file: int, offset: int, data: bytes, *, index: bool = False) -> Iterator[WeightPiece]:
        nonlocal position
        for start in range(0, len(data), piece_bytes):
            part = data[start : start + piece_bytes]
            last = index and start + len(part) == len(data)
            yield WeightPiece(
                position=position,
                file=file,
                offset=offset + start,
                data=part,
                crc=zlib.crc32(part),
                index=index,
                last=last,
            )
            position += len(part)

    for number, tensors in enumerate(files):
        header, begin = {}, 0
        for name, tensor in tensors.items():
            end = begin + tensor.nbytes
            header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [begin, end]}
            begin = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        content = b"".join(tensor.tobytes() for tensor in tensors.values())
        head = struct.pack("<Q", len(text)) + text
        yield from cut(number, len(head), content)
        yield from cut(number, 0, head)
        several = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        name = "model.safetensors" if len(files) == 1 else several
        digest = hashlib.sha256(content + head).hexdigest()
        shards[name] = {"bytes": len(head) + len(content), "sha256": digest}
        weight_map |= dict.fromkeys(tensors, name)
    size = sum(tensor.nbytes for tensors in files for tensor in tensors.values())
    index = {"metadata": {"total_size": size, "shards": shards}, "weight_map": weight_map}
    yield from cut(len(files), 0, json.dumps(index).encode(), index=True)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(16, 400))
def test_an_instance_takes_the_stream_and_has_the_tensors(
    tmp_path_factory: object, counts: list[int], piece_bytes: int
) -> None:
    folder: Path = tmp_path_factory.mktemp("stream")  # type: ignore[attr-defined]
    files: Files = [
        {f"layer.{number}.{each}": np.full((each + 1, 3), number, np.float32) for each in range(count)}
        for number, count in enumerate(counts)
    ]
    stored, index = StoredStream(folder), b""
    for piece in pieces_of(files, piece_bytes):
        stored.put(piece)
        index += piece.data if piece.index else b""
    assert stored.whole
    assert stored.checksum == "index-sha256:" + hashlib.sha256(index).hexdigest()
    assert safetensors.checksum(folder) == stored.checksum
    # Another instance that reads the folder gets the same bytes at the same positions.
    again = StoredStream.of_folder(folder)
    assert again.log.end == stored.log.end
    position = 0
    while position < again.log.end:
        first, second = stored.read(position, 1000), again.read(position, 1000)
        assert (first.file, first.offset, first.index) == (second.file, second.offset, second.index)
        shared = min(len(first.data), len(second.data))
        assert first.data[:shared] == second.data[:shared]
        position += shared
    found = {
        name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    for tensors in files:
        for name, tensor in tensors.items():
            assert np.array_equal(found.pop(name), tensor)
    assert not found
