"""A learner's whole state on disk: one file that appears complete or not at all, and is checked when it is read."""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from services.platform.errors import DataLoss

_MAGIC = b"paceline-drafter-state-1\n"
_DIGEST = hashlib.sha256().digest_size


class CorruptState(DataLoss):
    """The file holds no state that can be taken up: `what` is wrong with it."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"learner state {path}: {what}")


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Put `state` (tensors, numbers, containers of them) under `path`, replacing what is there. OSError: disk."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(_MAGIC + hashlib.sha256(content).digest() + content)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_state(path: Path) -> dict[str, Any]:
    """What `write_state` wrote. CorruptState: cannot be read, or is not what was written."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CorruptState(path, f"cannot be read: {error.strerror}") from error
    start = len(_MAGIC) + _DIGEST
    if not content.startswith(_MAGIC) or len(content) < start:
        raise CorruptState(path, "is not of a learner")
    if hashlib.sha256(content[start:]).digest() != content[len(_MAGIC) : start]:
        raise CorruptState(path, "is truncated or corrupt")
    found: dict[str, Any] = torch.load(io.BytesIO(content[start:]), map_location="cpu", weights_only=True)
    return found
