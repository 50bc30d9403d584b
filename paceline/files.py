"""Open files that others wrote or that are private to this user, safely, and make files durable.

Files that others wrote are opened only if they are regular files, and read up to a limit. JSON that cannot be
parsed is a ValueError, however deeply it is nested. Private files are safe in folders that other users may write
to.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any


def open_regular(path: Path) -> int:
    """Return a file descriptor to read a regular file.

    OSError: there is no file, or it is something else, such as a FIFO, which blocks on opening, or a device, which
    has no end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if os.path.isfile(descriptor):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


def read_regular(path: Path, most: int) -> bytes:
    """Return the content of a regular file. OSError as for `open_regular`, or above `most` bytes."""
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return content


MOST_CONFIG_BYTES = 16 << 20
"""Largest file of settings that is read, such as `config.json`."""


def parse_json(content: str | bytes) -> Any:
    """Return the value of a JSON text. ValueError: it is invalid, or nested too deep for Python (about 1,000)."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def parse_object(content: str | bytes) -> dict[str, Any]:
    """Return the object of a JSON text. ValueError: it is invalid, or no object."""
    found = parse_json(content)
    if not isinstance(found, dict):
        raise ValueError(f"it is no JSON object but a {type(found).__name__}")
    return found


def read_object(path: Path, most: int = MOST_CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file.

    ValueError: it holds no JSON object. OSError: it cannot be read, is no regular file, or has more than `most`
    bytes.
    """
    return parse_object(read_regular(path, most))


_OTHERS = 0o077
_OTHERS_WRITE = 0o022


class NotPrivateError(OSError):
    """A file or folder is not private to this user; the message says why, and what to do."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EPERM, why, str(path))
        self.path = path
        self.why = why

    def __str__(self) -> str:
        return f"{self.path} {self.why}"


def private_folder(folder: Path) -> Path:
    """Return a folder that only this user can enter; create it and its parents if it does not exist.

    If this user's folder can be read by others, its mode is changed.

    Raises:
        NotPrivateError: it belongs to another user, or is a symbolic link or no folder; or others can write to it,
            so that nothing in it can be trusted.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise NotPrivateError(folder, "is no folder, or a symbolic link: remove it") from error
        if error.errno == errno.EACCES:
            raise NotPrivateError(folder, "is closed to this user: remove it") from error
        raise
    try:
        found = os.fstat(descriptor)
        _check_owner(folder, found)
        if found.st_mode & _OTHERS_WRITE:
            raise NotPrivateError(
                folder, f"can be written to by others (mode {_mode(found)}): remove it, or chmod go-rwx it"
            )
        if found.st_mode & _OTHERS:
            os.fchmod(descriptor, stat.S_IMODE(found.st_mode) & ~_OTHERS)
    finally:
        os.close(descriptor)
    return folder


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, atomically: a reader sees the new content or the old one."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(part, flags, 0o600), "w") as file:
            file.write(text)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read_private(path: Path, most: int) -> str:
    """Return the content of a file that only this user can read.

    Raises:
        NotPrivateError: it belongs to another user, others can read it, or it is no regular file.
        OSError: it does not exist, cannot be read, or has more than `most` bytes.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotPrivateError(path, "is a symbolic link; must be the file itself") from error
        raise
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise NotPrivateError(path, "is no regular file")
        _check_owner(path, found)
        if found.st_mode & _OTHERS:
            raise NotPrivateError(path, f"has the mode {_mode(found)}; must be 0600: chmod 600 it")
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return content.decode("utf-8", "replace")


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise NotPrivateError(path, f"belongs to the user {found.st_uid}; must be one's own")


def _mode(found: os.stat_result) -> str:
    return f"{stat.S_IMODE(found.st_mode):04o}"


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
