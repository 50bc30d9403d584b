"""Download a model: resumable, verified, and complete only when its receipt is in the folder."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from paceline.files import read_object
from services.contracts.files import write_durably
from services.models.source import CONFIGURATION, ModelError, RemoteFile, Source
from services.platform.tasks import ExponentialBackoff

Report = Callable[[str], None]
"""Takes a line of progress."""


NAME = ".paceline-model.json"
"""Receipt in the folder of a complete model."""
WORK = ".paceline-download"
"""Folder in the model's folder for incomplete files."""
_BLOCK = 8 << 20
_THREADS = 4
_ATTEMPTS = 5
_FIRST_DELAY, _LONGEST_DELAY = 1.0, 30.0
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError)
"""Errors that another attempt does not cure."""


def download(
    source: Source,
    folder: Path,
    report: Report,
    *,
    interval: float = 10.0,
    pause: Callable[[float], None] = time.sleep,
) -> Receipt:
    """Download a model to `folder` and return its receipt; complete files are not fetched again.

    Args:
        source: the model.
        folder: its folder, which is created if missing.
        report: gets lines of progress.
        interval: least seconds between two lines.
        pause: waits between attempts.

    Raises:
        ModelError: the source or a file cannot be read, or the folder has another model or no room. Received bytes
            are kept.
        OSError: the folder cannot be created or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (receipt := present(source.address, folder)) is not None:
        report(f"{folder} has {source.address} already")
        return receipt
    with _alone(folder):
        if (
            receipt := present(source.address, folder)
        ) is not None:  # another process has downloaded it meanwhile
            return receipt
        files = source.files()
        if not any(each.checksum for each in files):
            report(f"{source.address} has no checksums: only sizes are compared")
        _check_room(folder, files)
        total = sum(each.size or 0 for each in files)
        fetch = _Fetch(source, folder, DownloadProgress(total, len(files), report, interval), pause)
        last = [each for each in files if each.path == CONFIGURATION]
        with ThreadPoolExecutor(_THREADS, "download") as threads:
            list(threads.map(fetch.file, [each for each in files if each not in last]))
        for each in last:
            fetch.file(each)
        receipt = Receipt(
            source.address,
            source.resolved,
            {each.path: (folder / each.path).stat().st_size for each in files},
        )
        receipt.write(folder)
        return receipt


def present(address: str, folder: Path) -> Receipt | None:
    """Return the receipt of a complete model, None if there is none; ModelError if it is another model's."""
    receipt = read_receipt(folder)
    if receipt is not None and receipt.source != address:
        raise ModelError(f"{folder} has {receipt.source}: give {address} another folder, or remove it")
    return receipt if receipt is not None and receipt.holds(folder) else None


@dataclass(frozen=True, slots=True)
class Receipt:
    """Source of a model as it was given and as it was resolved, and the sizes of its files in bytes."""

    source: str
    resolved: str
    sizes: dict[str, int] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the receipt to the model's folder."""
        write_durably(folder / NAME, (json.dumps(asdict(self), indent=1) + "\n").encode())

    def holds(self, folder: Path) -> bool:
        """Return True if all files are in the folder with their sizes."""
        try:
            return all((folder / path).stat().st_size == size for path, size in self.sizes.items())
        except OSError:
            return False


def read_receipt(folder: Path) -> Receipt | None:
    """Return the receipt in a folder; None if it is missing or unreadable."""
    try:
        return Receipt(**read_object(folder / NAME))
    except (OSError, ValueError, TypeError):
        return None


class _Fetch:
    """Fetches files, one per call, in any thread."""

    def __init__(
        self, source: Source, folder: Path, progress: DownloadProgress, pause: Callable[[float], None]
    ) -> None:
        self._source = source
        self._folder = folder
        self._progress = progress
        self._pause = pause

    def file(self, file: RemoteFile) -> None:
        """Fetch a file, unless it is complete with its checksum."""
        target = self._folder / file.path
        if not _is_there(target, file):
            part = self._folder / WORK / f"{file.path}.part"
            part.parent.mkdir(parents=True, exist_ok=True)
            self._until_complete(file, part)
            target.parent.mkdir(parents=True, exist_ok=True)
            part.replace(target)
        else:
            self._progress.found(target.stat().st_size)
        self._progress.finished_file()

    def _until_complete(self, file: RemoteFile, part: Path) -> None:
        backoff = ExponentialBackoff(_FIRST_DELAY, _LONGEST_DELAY)
        if part.exists():
            self._progress.found(part.stat().st_size)
        while True:
            try:
                return self._attempt(file, part)
            except _FINAL as error:
                raise ModelError(f"{self._source.address}: {file.path}: {error}") from error
            except (
                Exception
            ) as error:  # libraries raise different ones; all count as transient until they repeat
                delay = backoff.failed()
                if backoff.failures == _ATTEMPTS:
                    text = f"{self._source.address}: {file.path}: {error or type(error).__name__}"
                    raise ModelError(text) from error
                self._pause(delay)

    def _attempt(self, file: RemoteFile, part: Path) -> None:
        """Fetch the missing end of a file; an interruption keeps received bytes, a wrong file is deleted."""
        digest = _digest(file)
        offset = _feed(digest, part)
        with part.open("ab") as out:
            if file.size is None or offset < file.size:
                with self._source.open(file.path, offset) as remote:
                    while block := remote.read(_BLOCK):
                        out.write(block)
                        digest.update(block)
                        self._progress.received(len(block))
            out.flush()
            os.fsync(out.fileno())
        size = part.stat().st_size
        if file.size is not None and size < file.size:
            raise ModelError(f"ended after {size} of {file.size} bytes")
        if (file.size is not None and size != file.size) or digest.hexdigest() != (
            file.checksum or digest.hexdigest()
        ):
            part.unlink()
            self._progress.lost(size)
            raise ModelError(f"does not have the {file.algorithm} checksum or size that its source states")


def _is_there(target: Path, file: RemoteFile) -> bool:
    if not file.checksum or not target.is_file() or file.size not in (None, target.stat().st_size):
        return False
    digest = _digest(file)
    _feed(digest, target)
    return digest.hexdigest() == file.checksum


def _digest(file: RemoteFile) -> hashlib._Hash:
    if file.algorithm == "git":
        return hashlib.sha1(b"blob %d\0" % (file.size or 0), usedforsecurity=False)
    return hashlib.sha256()


def _feed(digest: hashlib._Hash, path: Path) -> int:
    """Feed a file to a digest, and return its size; 0 if there is none."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return path.stat().st_size


def _check_room(folder: Path, files: list[RemoteFile]) -> None:
    parts = [folder / WORK / f"{each.path}.part" for each in files]
    present_files = [*(folder / each.path for each in files), *parts]
    needed = sum(each.size or 0 for each in files) - sum(
        each.stat().st_size for each in present_files if each.exists()
    )
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ModelError(f"{folder} has room for {free / 1e9:.1f} GB, and {needed / 1e9:.1f} GB are needed")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process downloads to the folder, and keep others out."""
    work = folder / WORK
    work.mkdir(exist_ok=True)
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    # A process that waits for the removed lock finds the model complete.
    shutil.rmtree(work, ignore_errors=True)


class DownloadProgress:
    """Count bytes and files of all threads; report a line at most every `interval` seconds, and at the end."""

    def __init__(self, total: int, files: int, report: Report, interval: float) -> None:
        self._total = total
        self._files = files
        self._report = report
        self._interval = interval
        self._lock = threading.Lock()
        self._began = self._reported_at = time.monotonic()
        self._present = self._received = self._done = 0

    def found(self, size: int) -> None:
        """Count bytes that were in the folder already."""
        with self._lock:
            self._present += size

    def received(self, size: int) -> None:
        """Count received bytes."""
        with self._lock:
            self._present += size
            self._received += size
            now = time.monotonic()
            if now - self._reported_at >= self._interval:
                self._reported_at = now
                self._report(self._line(now))

    def lost(self, size: int) -> None:
        """Subtract bytes that must be fetched again."""
        with self._lock:
            self._present -= size

    def finished_file(self) -> None:
        """Count a complete file."""
        with self._lock:
            self._done += 1
            if self._done == self._files:
                self._report(self._line(time.monotonic()))

    def _line(self, now: float) -> str:
        share = f" ({self._present / self._total:.0%})" if self._total else ""
        rate = self._received / max(now - self._began, 1e-9)
        return (
            f"{self._present / 1e9:.2f} of {self._total / 1e9:.2f} GB{share}, {rate / 1e6:.0f} MB/s, "
            f"{self._done} of {self._files} files"
        )
