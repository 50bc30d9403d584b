"""Compact folders (deltas, adapters) that instances expand to a version of the weights, given a base version."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from paceline.files import open_regular, parse_object, read_regular, sync
from paceline.weights import safetensors

MANIFEST = "expansion.json"
"""Manifest of a folder that must be expanded."""
ADAPTER_CHECKSUM = "adapter-sha256:"
"""Prefix of the checksum of an adapter."""
_FORMAT = 1
_READ_BYTES = 1 << 20


class ExpansionKind(StrEnum):
    """Kind of a folder that must be expanded."""

    DELTA = "delta"
    ADAPTER = "adapter"


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """A full version of the weights, on which a delta or an adapter builds."""

    version: int
    checksum: str
    """Result of `safetensors.checksum`."""
    path: str = ""
    """Folder in which the trainer has it; "" if unknown, as for the model with which the fleet started."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Expansion:
    """Content of `expansion.json`: the kind of the folder, its base version, and its other files."""

    kind: ExpansionKind
    base: BaseWeights
    files: Mapping[str, StoredFile] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Total size of the files."""
        return sum(file.bytes for file in self.files.values())


def describe(path: Path) -> StoredFile:
    """Return the size and the SHA-256 of a file, reading it once."""
    digest = hashlib.sha256()
    with os.fdopen(open_regular(path), "rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
        return StoredFile(file.tell(), digest.hexdigest())


def write(folder: Path, kind: ExpansionKind, base: BaseWeights, names: Iterable[str]) -> Expansion:
    """Make the named files of a folder durable, describe them, and write the manifest last."""
    for name in names:
        sync(folder / name)
    expansion = Expansion(kind, base, {name: describe(folder / name) for name in names})
    unfinished = folder / f"{MANIFEST}.unfinished"
    with unfinished.open("x") as file:
        json.dump({"format": _FORMAT, **asdict(expansion)}, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(folder / MANIFEST)
    sync(folder)
    return expansion


def read(folder: Path) -> Expansion | None:
    """Return the manifest of a folder; None if it has none.

    ValueError: the manifest is corrupt, or of another format.
    """
    try:
        content = read_regular(folder / MANIFEST, safetensors.MOST_INDEX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        manifest = parse_object(content)
        if manifest["format"] != _FORMAT:
            raise ValueError(f"its format is {manifest['format']!r}; must be {_FORMAT}")
        base, files = BaseWeights(**manifest["base"]), manifest["files"].items()
        if not (type(base.version) is int and isinstance(base.checksum, str) and isinstance(base.path, str)):
            raise ValueError("its base is not one")
        if not all(type(file["bytes"]) is int for _, file in files):
            raise ValueError("the size of a file is no integer")
        stored = {str(name): StoredFile(file["bytes"], str(file["sha256"])) for name, file in files}
        if wrong := [name for name in stored if Path(name).name != name or name == MANIFEST]:
            raise ValueError(f"{wrong[0]!r} is no file name")
        return Expansion(ExpansionKind(manifest["kind"]), base, stored)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / MANIFEST} is corrupt: {error!r}") from error


def is_expansion(folder: Path) -> bool:
    """Return True if a folder must be expanded."""
    return (folder / MANIFEST).is_file()


def checksum(folder: Path, proceed: Callable[[], object] = lambda: None) -> str:
    """Return the checksum of the weights of a folder, which may be a delta or an adapter.

    A delta has the index of the weights to which it leads, and so their checksum. The checksum of an adapter is
    `adapter-sha256:<hex>` of its manifest, which contains the checksums of its files and of its base. `proceed` is
    called while files are read; an exception that it raises ends the work.

    ValueError: the folder has no weights.
    """
    expansion = read(folder)
    if expansion is not None and expansion.kind is ExpansionKind.ADAPTER:
        return f"{ADAPTER_CHECKSUM}{describe(folder / MANIFEST).sha256}"
    return safetensors.checksum(folder, proceed)
