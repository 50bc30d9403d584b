"""Small folders that instances expand to a version of the weights, given another version that they hold."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from paceline.files import open_regular, parse_object, read_regular
from paceline.weights import safetensors

MANIFEST = "expansion.json"
"""File that makes a folder one that is to be expanded."""
ADAPTER_CHECKSUM = "adapter-sha256:"
"""How the checksum of an adapter begins."""
_FORMAT = 1
_READ_BYTES = 1 << 20


class ExpansionKind(StrEnum):
    """Kind of a folder that is to be expanded."""

    DELTA = "delta"
    ADAPTER = "adapter"


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """A full version of the weights that others build on."""

    version: int
    checksum: str
    """As of `safetensors.checksum`."""
    path: str = ""
    """Folder in which the trainer has it, or "", as for the model that the fleet started with."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Expansion:
    """Content of `expansion.json`: what the folder is, against what it is expanded, and its other files."""

    kind: ExpansionKind
    base: BaseWeights
    files: Mapping[str, StoredFile] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of the files."""
        return sum(file.bytes for file in self.files.values())


def describe(path: Path) -> StoredFile:
    """Return size and SHA-256 of a file, which is read once."""
    digest = hashlib.sha256()
    with os.fdopen(open_regular(path), "rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
        return StoredFile(file.tell(), digest.hexdigest())


def write(folder: Path, kind: ExpansionKind, base: BaseWeights, names: Iterable[str]) -> Expansion:
    """Describe the named files of a folder, make them durable, and write the manifest, which comes last."""
    for name in names:
        safetensors.sync(folder / name)
    expansion = Expansion(kind, base, {name: describe(folder / name) for name in names})
    unfinished = folder / f"{MANIFEST}.unfinished"
    with unfinished.open("x") as file:
        json.dump({"format": _FORMAT, **asdict(expansion)}, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(folder / MANIFEST)
    safetensors.sync(folder)
    return expansion


def read(folder: Path) -> Expansion | None:
    """Return what a folder says of itself; None if it is not to be expanded.

    ValueError: the manifest is corrupt, or of a later format.
    """
    try:
        content = read_regular(folder / MANIFEST, safetensors.MOST_INDEX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        told = parse_object(content)
        if told["format"] != _FORMAT:
            raise ValueError(f"its format is {told['format']!r}, this program knows {_FORMAT}")
        base, files = BaseWeights(**told["base"]), told["files"].items()
        if not (type(base.version) is int and isinstance(base.checksum, str) and isinstance(base.path, str)):
            raise ValueError("its base is none")
        stored = {str(name): StoredFile(int(file["bytes"]), str(file["sha256"])) for name, file in files}
        if wrong := [name for name in stored if Path(name).name != name or name == MANIFEST]:
            raise ValueError(f"{wrong[0]!r} is no file name")
        return Expansion(ExpansionKind(told["kind"]), base, stored)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / MANIFEST} is corrupt: {error!r}") from error


def is_one(folder: Path) -> bool:
    """Return True if a folder is to be expanded."""
    return (folder / MANIFEST).is_file()


def checksum(folder: Path, proceed: Callable[[], object] = lambda: None) -> str:
    """Return the checksum of the weights of a folder, whether or not they are to be expanded.

    That of a delta is the checksum of the weights that it leads to: it has their index. An adapter's is
    `adapter-sha256:<hex>` of its manifest, which has those of its files and of its base. `proceed` is called while
    files are read; what it raises ends the work.

    ValueError: the folder has no weights.
    """
    expansion = read(folder)
    if expansion is not None and expansion.kind is ExpansionKind.ADAPTER:
        return f"{ADAPTER_CHECKSUM}{describe(folder / MANIFEST).sha256}"
    return safetensors.checksum(folder, proceed)
