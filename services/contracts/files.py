"""Write a file that survives a power failure, and check the paths of folders with weights."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.errors import Violation
from services.contracts.errors import InvalidArgument

_MAX_PATH_BYTES, _MAX_NAME_BYTES = 4095, 255
"""Longest path, and longest name in it, that Linux opens."""
_SHOWN = 200


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and wait until its content is on disk; OSError if that fails."""
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def check_weight_folder(
    path: str, root: Path | None, *, follow_links: bool = False, field: str = "disk.path"
) -> None:
    """Check that Linux can open a path, that it is absolute and, if there is a `root`, within it.

    Args:
        path: path of a folder with weights.
        root: folder that must contain it; None: any.
        follow_links: resolve symbolic links in the file system first.
        field: field of the request, which errors name.

    Raises:
        InvalidArgument: one of these does not hold; the error names the root.
    """
    shown = repr(path if len(path) <= _SHOWN else f"{path[:_SHOWN]}...")
    if not os.path.isabs(path):
        raise InvalidArgument([Violation(field, f"is {shown}; must be an absolute path")])
    if "\0" in path:
        raise InvalidArgument([Violation(field, f"is {shown}; must not contain a NUL character")])
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        raise InvalidArgument([Violation(field, f"is {shown}; must be text that UTF-8 can encode")]) from None
    if len(encoded) > _MAX_PATH_BYTES or any(len(name) > _MAX_NAME_BYTES for name in encoded.split(b"/")):
        limits = f"at most {_MAX_PATH_BYTES} bytes, {_MAX_NAME_BYTES} in each name"
        raise InvalidArgument([Violation(field, f"is {shown}; must have {limits}")])
    if root is None:
        return
    plain = os.path.realpath if follow_links else os.path.normpath
    if not Path(plain(path)).is_relative_to(plain(root)):
        raise InvalidArgument([Violation(field, f"is {shown}; must be in weights_root, {str(root)!r}")])
