"""Folder in which the instances of a deployment keep the weights that trainers gave them."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline import safetensors
from services.contracts.errors import FailedPrecondition


class AdoptedWeights:
    """Weights by version and checksum, which outlive the folders that they came from.

    Several instances share a folder. A version is there as a whole or not at all.
    """

    def __init__(self, root: Path) -> None:
        # The ranks of a tensor parallel group get paths, wherever they run.
        self._root = root.absolute()

    def adopt(self, folder: Path, version: int, checksum: str) -> Path:
        """Return the folder here of the weights of a version; they are taken over from `folder` if need be.

        Files that the SDK wrote are linked where the file system allows it, since it never writes into one again.
        All others are copied. Where neither place has weights, the answer is `folder`.

        Raises:
            FailedPrecondition: the weights cannot be taken over; the disk is full, for example.
        """
        place = self._place(version, checksum)
        try:
            with self._locked():
                if not place.is_dir():
                    files = sorted(folder.glob("*.safetensors"))
                    if not files:
                        return folder
                    self.sweep()
                    self._take(files, place)
        except OSError as error:
            text = f"the weights in {folder} cannot be taken over to {self._root}: {error}"
            raise FailedPrecondition("WEIGHTS_NOT_ADOPTED", text) from error
        return place

    def hide(self, version: int) -> None:
        """Give up the weights of a version that is not to be served; `prune` frees their space."""
        for place in self._root.glob(f"v{version:08d}-*"):
            _hide(place)

    def prune(self, version: int, checksum: str) -> None:
        """Remove what is neither this version, nor the one before, nor a later one."""
        served = self._place(version, checksum)
        upto = [place for place in sorted(self._root.glob("v*-*")) if place.name[:9] <= served.name[:9]]
        before = [place for place in upto if place.name[:9] < served.name[:9]]
        for place in upto:
            if place not in (served, *before[-1:]):
                _hide(place)
        self.sweep()

    def sweep(self) -> None:
        """Free the space of what was given up."""
        for place in self._root.glob(".removed-*"):
            shutil.rmtree(place, ignore_errors=True)

    def _place(self, version: int, checksum: str) -> Path:
        return self._root / f"v{version:08d}-{hashlib.sha256(checksum.encode()).hexdigest()[:16]}"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let one instance take weights over, for all; a lock ends with its process."""
        self._root.mkdir(parents=True, exist_ok=True)
        with (self._root / ".lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _take(self, files: list[Path], place: Path) -> None:
        unfinished = place.with_name(f".taking-{place.name}")
        shutil.rmtree(unfinished, ignore_errors=True)  # of an instance that died
        unfinished.mkdir()
        index = files[0].parent / safetensors.INDEX
        written_once = _has_checksums(index)
        try:
            for file in files:
                _take_file(file.resolve(), unfinished / file.name, link=written_once)
            if index.is_file():
                shutil.copyfile(index, unfinished / index.name)
            unfinished.rename(place)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise


def _has_checksums(index: Path) -> bool:
    try:
        return safetensors.index_checksum(index.parent) != ""
    except ValueError:
        return False


def _take_file(source: Path, target: Path, *, link: bool) -> None:
    if link:
        # Another file system, or another owner: EXDEV, EPERM and their like.
        with suppress(OSError):
            return os.link(source, target)
    shutil.copyfile(source, target)


def _hide(place: Path) -> None:
    """Take a folder out of sight at once; what is half removed must not look whole.

    What cannot be removed, or another instance has removed, costs no update.
    """
    with suppress(OSError):
        place.rename(place.with_name(f".removed-{uuid.uuid4().hex}"))
