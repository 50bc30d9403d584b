"""Every reader of JSON that others write: whatever it is given, it answers with the error that it promises."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from kernels.suffix_index import records
from paceline.files import parse_json, parse_object, read_object
from paceline.report import facts
from paceline.weights import delta, expansion, safetensors
from services.contracts import drafter_checkpoint
from services.contracts.errors import DataLoss, InvalidArgument, ServiceError
from services.contracts.schemas import schema_faults
from services.facade import text
from services.facade.dialects import chat
from services.facade.work.jobs import check_unicode
from services.generation.weights import adapters, files
from services.generation.weights.staging import read_manifest
from services.generation.weights.stream.stored_stream import StoredStream
from services.models import download
from services.platform.config import ConfigError, ServiceConfig, read_config
from services.platform.security.certificates import Unreadable
from services.platform.security.guard import read_grants
from services.reallocator.planning.throughput import UnsupportedArchitecture, architecture_of

DEEP = 1_000_000
FORMS: dict[str, bytes] = {
    "deep-list": b"[" * DEEP + b"]" * DEEP,
    "deep-object": b'{"a":' * DEEP + b"0" + b"}" * DEEP,
    "deep-mixed": b'[{"a":' * DEEP + b"0" + b"}]" * DEEP,
    "deep-unclosed": b'{"a":[' * DEEP,
    "deep-inside": b'{"metadata":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "huge-integer": b"1" * 6000,
    "huge-integer-inside": b'{"metadata":{"shards":' + b"1" * 6000 + b"}}",
    "no-number": b"NaN",
    "no-numbers-inside": b'{"metadata":NaN,"format":Infinity,"base":1e999}',
    "twice": b'{"metadata":1,"metadata":{"shards":{"a":{}}}}',
    "no-utf8": b'{"metadata":"\xff"}',
    "mark": b"\xef\xbb\xbf{}",
    "wide": '{"metadata":1}'.encode("utf-16"),
    "empty": b"",
    "null": b"null",
    "number": b"3",
    "text": b'"metadata"',
    "list": b'["metadata","shards"]',
    "strange-object": b'{"metadata":{"shards":[1,2]},"architectures":{},"tensor":7}',
}


def with_header(read: Callable[[Path], object]) -> Callable[[Path, bytes], object]:
    def reading(folder: Path, content: bytes) -> object:
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(content)) + content)
        return read(folder)

    return reading


def with_file(name: str, read: Callable[[Path], object]) -> Callable[[Path, bytes], object]:
    def reading(folder: Path, content: bytes) -> object:
        (folder / name).write_bytes(content)
        return read(folder)

    return reading


def of_text(read: Callable[[str], object]) -> Callable[[Path, bytes], object]:
    return lambda _, content: read(content.decode(errors="replace"))


def saved_index(_: Path, content: bytes) -> object:
    body = records._MAGIC + records._LENGTH.pack(len(content)) + content
    return records.read(body + records._digest(body))


def model_without_header(folder: Path) -> object:
    header = b'{"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return read_manifest(folder)


@dataclass(frozen=True)
class Reader:
    """How content is read, and the errors that are promised for content that cannot be."""

    read: Callable[[Path, bytes], object]
    refusals: tuple[type[Exception], ...] = (ValueError,)


TYPED = (DataLoss, InvalidArgument)
READERS: dict[str, Reader] = {
    "json": Reader(lambda _, content: parse_json(content)),
    "object": Reader(lambda _, content: parse_object(content)),
    "object-in-file": Reader(with_file("x.json", lambda folder: read_object(folder / "x.json"))),
    "expansion": Reader(with_file(expansion.MANIFEST, expansion.read)),
    "index": Reader(with_file(safetensors.INDEX, safetensors.index_checksum)),
    "index-of-delta": Reader(with_file(safetensors.INDEX, delta._files)),
    "header-of-delta": Reader(lambda _, content: delta._parse(content[:8].ljust(8) + content, 0)),
    "index-of-shards": Reader(
        with_file(safetensors.INDEX, lambda folder: files.open_weight_files(folder, indexed=True, served=10)),
        TYPED,
    ),
    "header": Reader(
        with_header(lambda folder: files.open_weight_files(folder, indexed=False, served=1 << 18)), TYPED
    ),
    "adapter": Reader(with_file(adapters.CONFIG, lambda folder: adapters.read_adapter(folder, {})), TYPED),
    "manifest": Reader(with_file("config.json", model_without_header), TYPED),
    "stream": Reader(with_file(safetensors.INDEX, StoredStream.of_folder), (ValueError, OSError)),
    "drafter": Reader(
        with_file(drafter_checkpoint.CONFIG, drafter_checkpoint.read_config),
        (drafter_checkpoint.CorruptCheckpoint,),
    ),
    "receipt": Reader(with_file(download.NAME, download.read_receipt), ()),
    "step-times": Reader(
        with_file("config.json", lambda folder: architecture_of(folder, "bfloat16")),
        (UnsupportedArchitecture,),
    ),
    "tokenizer": Reader(
        with_file("tokenizer_config.json", lambda f: text._json(f / "tokenizer_config.json")), ()
    ),
    "decision-log": Reader(of_text(lambda content: facts.parsed([content]))),
    "schema": Reader(of_text(schema_faults.__wrapped__), ()),
    "tool-arguments": Reader(of_text(chat._arguments), ()),
    "body": Reader(lambda _, content: check_unicode(content), (InvalidArgument,)),
    "suffix-index": Reader(saved_index),
    "tokens": Reader(with_file("t.yaml", lambda folder: read_grants(folder / "t.yaml")), (Unreadable,)),
    "settings": Reader(
        with_file(
            "c.yaml", lambda folder: read_config(ServiceConfig, ["--config", str(folder / "c.yaml")], {})
        ),
        (ConfigError,),
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", READERS)
def test_json_of_others_is_read_or_refused_as_promised(tmp_path: Path, name: str, form: str) -> None:
    reader, content = READERS[name], FORMS[form]
    if name in ("tokens", "settings"):
        # YAML is parsed in Python, and slowly.
        content = content if len(content) < 10_000 else content[:2500]
    # Of what is as deep nothing can be taken: it is refused, or taken as nothing. Bodies are parsed later.
    must = form.startswith("deep") and reader.refusals and name != "body"
    with pytest.raises(reader.refusals) if must else suppress(*reader.refusals):
        reader.read(tmp_path, content)


@pytest.mark.parametrize(
    "read",
    [
        lambda path: read_object(path / "x"),
        lambda path: drafter_checkpoint.read_config(path),
        lambda path: drafter_checkpoint.digest(path),
        lambda path: delta._files(path),
        lambda path: StoredStream.of_folder(path),
        lambda path: architecture_of(path, "bfloat16"),
        lambda path: files.read_header(path / "model.safetensors"),
    ],
)
def test_a_pipe_is_no_file(tmp_path: Path, read: Callable[[Path], object]) -> None:
    names = ("x", drafter_checkpoint.CONFIG, safetensors.INDEX, "config.json", "model.safetensors")
    for name in set(names):
        os.mkfifo(tmp_path / name)
    with pytest.raises((OSError, ValueError, ServiceError, UnsupportedArchitecture)):
        read(tmp_path)


@pytest.mark.parametrize(("served", "allowed"), [(300, True), (10, False)])
def test_a_header_has_room_for_what_the_served_model_has(tmp_path: Path, served: int, allowed: bool) -> None:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"tensor.{number}": empty for number in range(2000)}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    if allowed:
        (found,) = files.open_weight_files(tmp_path, indexed=False, served=served)
        assert len(found.tensors) == 2000
    else:
        with pytest.raises(InvalidArgument, match="allowed are 1064"):
            files.open_weight_files(tmp_path, indexed=False, served=served)


def test_a_header_that_is_too_long_is_never_parsed(tmp_path: Path) -> None:
    size = 3 << 20
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", size) + b"[" * size)
    with pytest.raises(InvalidArgument, match=f"header of {size} bytes, allowed are"):
        files.open_weight_files(tmp_path, indexed=False, served=10)
