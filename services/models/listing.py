"""Lists of a model's files: which are wanted, and their checksums. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

_LINE = re.compile(r"(?P<sha256>[0-9a-fA-F]{64}) [ *](?P<path>.+)")
_OF_THE_HUB = (".gitattributes", ".gitignore", "README.md", "LICENSE*")
_IN_OTHER_FORMS = ("*.bin", "*.pt", "*.pth", "*.msgpack", "*.h5", "*.onnx", "*.gguf", "original/*")
"""Weights for other programs, which repositories often have besides safetensors."""
CONFIGURATION = "config.json"
"""File that makes a folder a model's; it comes last, so that a folder without it is unfinished."""


class ListingError(ValueError):
    """A list of files cannot be used; the message says which line or name."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """File of a model: its path relative to the folder, size in bytes and checksum, each if they are known.

    `algorithm` is sha256, or git for the SHA-1 by which Git names a blob.
    """

    path: str
    size: int | None = None
    checksum: str = ""
    algorithm: str = "sha256"


def read_checksums(text: str) -> dict[str, str]:
    """Return the SHA-256 by path from lines of `sha256sum`; ListingError for any other line."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.rstrip())
        if match is None:
            raise ListingError(f"no line of sha256sum: {line[:80]!r}")
        found[inside(match["path"])] = match["sha256"].lower()
    if not found:
        raise ListingError("the list of checksums is empty")
    return found


def inside(path: str) -> str:
    """Return a relative path in its plain form; ListingError if it leads out of the folder."""
    parts = PurePosixPath(path)
    if not path or parts.is_absolute() or ".." in parts.parts or "\\" in path or parts == PurePosixPath():
        raise ListingError(f"{path!r} leads out of the model's folder")
    return str(parts)


def wanted(files: Iterable[RemoteFile]) -> list[RemoteFile]:
    """Return the files that an instance reads: no weights in other forms where there are safetensors."""
    listed = list(files)
    left_out: tuple[str, ...] = _OF_THE_HUB
    if any(each.path.endswith(".safetensors") and "/" not in each.path for each in listed):
        left_out += _IN_OTHER_FORMS
    return [each for each in listed if not any(fnmatchcase(each.path, pattern) for pattern in left_out)]
