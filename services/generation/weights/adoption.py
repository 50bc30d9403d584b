"""Folder in which the instances of a deployment keep the weights that trainers gave them."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.files import read_regular
from paceline.weights import expansion, safetensors
from paceline.weights.expansion import BaseWeights
from services.contracts.errors import FailedPrecondition
from services.generation.weights.files import Proceed, WeightFile, never_stop

_COPY_BYTES = 64 << 20


class AdoptedWeights:
    """Weights by version and checksum, which outlive the folders that they came from.

    Several instances may share the folder. A version is there as a whole or not at all.
    """

    def __init__(self, root: Path) -> None:
        # Absolute, because the ranks of a tensor parallel group may run in other working directories.
        self._root = root.absolute()

    def adopt(
        self, files: Sequence[WeightFile], version: int, checksum: str, proceed: Proceed = never_stop
    ) -> Path:
        """Return the folder here of the weights of a version; the files, all in one folder, are added if needed.

        Files that the SDK wrote are linked where the file system allows it, since it never writes into one again.
        All others are copied, and `proceed` is called meanwhile.

        Raises:
            FailedPrecondition: the weights cannot be taken over; the disk is full, for example.
            DataLoss: a file changed since its header was read.
        """
        return self.make(version, checksum, lambda unfinished: _take(files, unfinished, proceed))

    def held(self, version: int, checksum: str) -> Path | None:
        """Return the folder here of the weights of a version, None if they are not here."""
        place = self._place(version, checksum)
        return place if place.is_dir() else None

    def make(self, version: int, checksum: str, fill: Callable[[Path], object]) -> Path:
        """Return the folder here of the weights of a version, which `fill` writes if they are not here.

        Raises:
            FailedPrecondition: they cannot be written; the disk is full, for example.
            Exception: of `fill`; nothing is left of what it wrote.
        """
        place = self._place(version, checksum)
        try:
            with self._locked():
                if not place.is_dir():
                    self.sweep()
                    self._fill(place, fill)
        except OSError as error:
            text = f"version {version} of the weights cannot be taken over to {self._root}: {error}"
            raise FailedPrecondition("WEIGHTS_NOT_ADOPTED", text) from error
        return place

    def links(self, folder: Path) -> bool:
        """Return True if the weights of a folder would be linked here, which takes no space and no time."""
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            one_disk = folder.stat().st_dev == self._root.stat().st_dev
            return one_disk and _has_checksums(folder) and os.access(folder, os.R_OK)
        except OSError:
            return False

    def versions(self) -> list[str]:
        """Return the versions here with their checksums, which are known only of folders that the SDK wrote."""
        return [
            f"{int(place.name[1:9])} {_checksum_of(place) or 'without an index'}"
            for place in sorted(self._root.glob("v*-*"))
        ]

    @contextmanager
    def checking(self, place: Path, *faults: type[Exception]) -> Iterator[None]:
        """Give a folder up if one of these errors shows that it is corrupt, and raise the error again.

        A folder of the trainer stays, and so does one that another instance has replaced meanwhile.
        """
        inode = place.stat().st_ino if place.is_dir() else 0
        try:
            yield
        except faults:
            if place.parent == self._root:
                with suppress(OSError), self._locked():
                    if place.stat().st_ino == inode:
                        _hide(place)
            raise

    def receiving(self, owner: str) -> Path:
        """Return an empty folder for weights that an instance receives, and remove its unfinished ones.

        Folders that were given up are removed first, because a superseded version must not take space in addition
        to the new one.
        """
        self.sweep()
        name = f".receiving-{hashlib.sha256(owner.encode()).hexdigest()[:16]}"
        for left in self._root.glob(f"{name}-*"):
            shutil.rmtree(left, ignore_errors=True)
        folder = self._root / f"{name}-{uuid.uuid4().hex}"
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            text = f"weights cannot be received in {self._root}: {error}"
            raise FailedPrecondition("WEIGHTS_NOT_ADOPTED", text) from error
        return folder

    def keep(self, received: Path, version: int, checksum: str) -> Path:
        """Return the folder here of received weights; another instance's folder if that was faster."""
        place = self._place(version, checksum)
        with self._locked():
            if not place.is_dir():
                self.sweep()
                received.rename(place)
        shutil.rmtree(received, ignore_errors=True)
        return place

    def hide(self, version: int) -> None:
        """Give up the weights of a version that is not to be served; `prune` frees their space."""
        for place in self._root.glob(f"v{version:08d}-*"):
            _hide(place)

    def prune(self, version: int, checksum: str) -> None:
        """Remove all versions but this one, the previous one, the bases of these two, and later ones."""
        served = self._place(version, checksum)
        upto = [place for place in sorted(self._root.glob("v*-*")) if place.name[:9] <= served.name[:9]]
        before = [place for place in upto if place.name[:9] < served.name[:9]]
        kept = {served, *before[-1:]}
        kept |= {self._place(base.version, base.checksum) for base in map(_base_of, kept) if base}
        for place in upto:
            if place not in kept:
                _hide(place)
        self.sweep()

    def sweep(self) -> None:
        """Remove the folders that were given up."""
        for place in self._root.glob(".removed-*"):
            shutil.rmtree(place, ignore_errors=True)

    def _place(self, version: int, checksum: str) -> Path:
        return self._root / f"v{version:08d}-{hashlib.sha256(checksum.encode()).hexdigest()[:16]}"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock by which one instance takes weights over for all; it ends with its process."""
        self._root.mkdir(parents=True, exist_ok=True)
        with (self._root / ".lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _fill(self, place: Path, fill: Callable[[Path], object]) -> None:
        unfinished = place.with_name(f".taking-{place.name}")
        shutil.rmtree(unfinished, ignore_errors=True)  # of an instance that died
        unfinished.mkdir()
        try:
            fill(unfinished)
            unfinished.rename(place)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise


def _take(files: Sequence[WeightFile], target: Path, proceed: Proceed) -> None:
    folder = files[0].path.parent
    written_once = _has_checksums(folder)
    for file in files:
        place = target / file.path.name
        if not (written_once and _link(file.path.resolve(), place)):
            _copy(file, place, proceed)
    if (index := folder / safetensors.INDEX).is_file():
        (target / index.name).write_bytes(read_regular(index, safetensors.MOST_INDEX_BYTES))


def _has_checksums(folder: Path) -> bool:
    return _checksum_of(folder) != ""


def _checksum_of(folder: Path) -> str:
    try:
        return safetensors.index_checksum(folder)
    except (OSError, ValueError):
        return ""


def _base_of(place: Path) -> BaseWeights | None:
    """Return the weights that an adapter was merged with, which the next one will be merged with."""
    try:
        described = expansion.read(place)
    except (OSError, ValueError):
        return None
    return described.base if described else None


def _link(source: Path, target: Path) -> bool:
    """Link a file, or return False: another file system, or another owner, for example."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def _copy(file: WeightFile, target: Path, proceed: Proceed) -> None:
    """Copy the bytes that a file had when its header was read."""
    source = file.open()
    try:
        with target.open("xb", buffering=0) as sink:
            copied = 0
            while count := os.sendfile(sink.fileno(), source, copied, min(_COPY_BYTES, file.bytes - copied)):
                copied += count
                proceed()
    finally:
        os.close(source)


def _hide(place: Path) -> None:
    """Rename a folder at once, because a half removed one must not look complete.

    Failures are ignored: no update fails because a folder cannot be removed, or was removed by another instance.
    """
    with suppress(OSError):
        place.rename(place.with_name(f".removed-{uuid.uuid4().hex}"))
