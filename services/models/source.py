"""Sources of models: folders that fsspec opens, and repositories of the Hugging Face hub.

A source lists the files that an instance needs, with their checksums.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import IO, Any, cast

CHECKSUMS = "SHA256SUMS"
"""List that a folder may have, in the format of `sha256sum *`."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_BLOCK = 8 << 20
_WEB = ("http", "https")
"""Schemes whose folders cannot be listed."""
_LINE = re.compile(r"(?P<sha256>[0-9a-fA-F]{64}) [ *](?P<path>.+)")
_OF_THE_HUB = (".gitattributes", ".gitignore", "README.md", "LICENSE*")
_IN_OTHER_FORMS = ("*.bin", "*.pt", "*.pth", "*.msgpack", "*.h5", "*.onnx", "*.gguf", "original/*")
"""Weights for other programs, which many repositories have in addition to safetensors."""
CONFIGURATION = "config.json"
"""File without which a folder is no model; it is written last, so that a folder without it is unfinished."""


class ListingError(ValueError):
    """A list of files cannot be used; the message says which line or name."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """File of a model: its path relative to the folder, size in bytes and checksum, each if known.

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
            raise ListingError(f"not a line of sha256sum: {line[:80]!r}")
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
    """Return the files that an instance reads; if there are safetensors, weights in other formats are left out."""
    listed = list(files)
    left_out: tuple[str, ...] = _OF_THE_HUB
    if any(each.path.endswith(".safetensors") and "/" not in each.path for each in listed):
        left_out += _IN_OTHER_FORMS
    return [each for each in listed if not any(fnmatchcase(each.path, pattern) for pattern in left_out)]


class ModelError(RuntimeError):
    """Raised when a model cannot be found or downloaded; the message names its source."""


def as_source(name: str) -> str:
    """Return the address of a model that is named by its address or as organization/name on the hub.

    ModelError if it is neither.
    """
    if "://" in name:
        return name
    if _HUB_NAME.fullmatch(name):
        return f"hf://{name}"
    raise ModelError(f"{name!r} is neither a folder, nor organization/name on the hub, nor an address")


class Source:
    """Remote folder of a model, opened by its address. `checksums` is the address of a list, if there is one."""

    def __init__(self, address: str, checksums: str = "") -> None:
        """Open the source; ModelError if that fails or needs a package that is not installed."""
        self.address = address
        """Address as given."""
        self._checksums = checksums
        self._files, self._root = _opened(address)
        if address.startswith("hf://"):
            self._root = _at_one_commit(address, self._files, self._root)

    @property
    def resolved(self) -> str:
        """Root of the files, with the commit that a branch of the hub pointed to."""
        return self._root

    def files(self) -> list[RemoteFile]:
        """Return the files that an instance needs; ModelError if they cannot be listed."""
        try:
            listed = self._by_checksums(self._checksum_text())
            if listed is None:
                listed = wanted(self._listed())
        except ModelError:
            raise
        except ListingError as error:
            raise ModelError(f"{self.address}: {error}") from error
        except Exception as error:  # libraries raise different ones
            raise ModelError(f"{self.address} cannot be listed: {_text(error)}") from error
        if not listed:
            there = self._files.exists(self._root)
            raise ModelError(f"{self.address} {'has no files' if there else 'does not exist'}")
        return listed

    def open(self, path: str, offset: int) -> IO[bytes]:
        """Open a file for reading from `offset`."""
        name = f"{self._root}/{path}"
        web = self.address.partition("://")[0] in _WEB
        if not web or (offset and self._files.info(name).get("partial")):
            file = cast(IO[bytes], self._files.open(name, "rb"))
            file.seek(offset)
        else:  # as a stream; a web server that sends only whole files sends the beginning again
            file = cast(IO[bytes], self._files.open(name, "rb", block_size=0))
            _skip(file, offset)
        return file

    def _checksum_text(self) -> str | None:
        if self._checksums:
            files, path = _opened(self._checksums)
            return str(files.cat_file(path).decode())
        try:
            return str(self._files.cat_file(f"{self._root}/{CHECKSUMS}").decode())
        except FileNotFoundError:
            if self.address.partition("://")[0] in _WEB:
                raise ModelError(
                    f"{self.address} has no {CHECKSUMS}, and a web server lists no files"
                ) from None
            return None

    def _by_checksums(self, text: str | None) -> list[RemoteFile] | None:
        if text is None:
            return None
        return [
            RemoteFile(path, self._files.info(f"{self._root}/{path}").get("size"), checksum)
            for path, checksum in read_checksums(text).items()
        ]

    def _listed(self) -> list[RemoteFile]:
        found = self._files.find(self._root, detail=True)
        start = f"{self._root.rstrip('/')}/"
        return [
            _remote(inside(name.removeprefix(start)), details)
            for name, details in sorted(found.items())
            if details["type"] == "file"
        ]


def _skip(file: IO[bytes], size: int) -> None:
    while size and (block := file.read(min(size, _BLOCK))):
        size -= len(block)


def _remote(path: str, details: Mapping[str, Any]) -> RemoteFile:
    if (large := details.get("lfs")) is not None:
        return RemoteFile(path, details["size"], large["sha256"])
    if blob := details.get("blob_id"):
        return RemoteFile(path, details["size"], blob, "git")
    return RemoteFile(path, details["size"])


def _opened(address: str) -> tuple[Any, str]:
    # Imported late: only these addresses need the package.
    from fsspec.core import url_to_fs

    try:
        files, root = url_to_fs(address)
    except (ImportError, ValueError, OSError) as error:
        raise ModelError(f"{address} cannot be opened: {_text(error)}") from error
    return files, str(root).rstrip("/")


def _at_one_commit(address: str, files: Any, root: str) -> str:
    """Return the root at the current commit of its branch, so that all files belong to one commit."""
    from huggingface_hub import HfApi

    try:
        place = files.resolve_path(root)
        commit = HfApi().repo_info(place.repo_id, repo_type=place.repo_type, revision=place.revision).sha
    except Exception as error:  # such as HTTP errors, an unknown name, or a gated repository
        raise ModelError(f"{address} cannot be found: {_text(error)}") from error
    return f"{place.repo_id}@{commit}/{place.path}".rstrip("/")


def _text(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
