"""State of a learner on disk: one file, written atomically and verified by its SHA-256 when it is read."""

from __future__ import annotations

import hashlib
import io
import uuid
from pathlib import Path
from typing import Any

import torch

from services.contracts.durable_files import write_durably
from services.contracts.errors import DataLoss

_MAGIC = b"paceline-drafter-state-1\n"
_DIGEST = hashlib.sha256().digest_size


class CorruptState(DataLoss):
    """The file holds no usable state; `what` says why."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"learner state {path}: {what}")


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors, numbers, containers of them) to `path`, replacing it. OSError: cannot be written."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.parent / f".{path.name}-{uuid.uuid4().hex}"
    try:
        write_durably(fresh, _MAGIC + hashlib.sha256(content).digest() + content)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def read_state(path: Path) -> dict[str, Any]:
    """Read what `write_state` wrote. CorruptState: it cannot be read, or differs from what was written."""
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
