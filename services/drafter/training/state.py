"""Durable states of the training session: weights, optimizer, counters, and the samples that are in them.

A state appears complete or not at all. It names the samples it was trained on whose acknowledgement the feed
may have missed, so a learner that continues from it neither trains on them twice nor loses any.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog
from pydantic import TypeAdapter

from services.contracts.durable_files import sync

log = structlog.get_logger(__name__)

LEARNER, MANIFEST = "learner", "manifest.json"
"""Files in the folder of a state: the one that the learner writes, and the manifest."""
_NAME = re.compile(r"state-(\d{8,})-[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Manifest:
    """Counters and samples that belong to the learner's weights.

    `used` are feed entries that were learned from and may not be acknowledged yet, `forced` the hashes of
    services/drafter/feed/buffer.py, and `since_roll_back` the updates since the last rollback (None: there was
    none).
    """

    updates: int = 0
    policy_version: int = 0
    samples_used: int = 0
    tokens_used: int = 0
    rejected: int = 0
    rollbacks: int = 0
    since_roll_back: int | None = None
    kd_loss: float = 0.0
    used: tuple[str, ...] = ()
    forced: tuple[int, ...] = ()


_MANIFESTS = TypeAdapter(Manifest)


class States:
    """States under one folder, also those of earlier processes."""

    def __init__(self, root: Path, keep: int = 2) -> None:
        self._root = root
        self._keep = keep

    def new(self) -> Path:
        """Create a folder for the next state, in which the learner writes LEARNER. OSError: that is impossible."""
        path = self._root / f".{uuid.uuid4().hex}"
        path.mkdir(parents=True)
        return path

    def commit(self, fresh: Path, manifest: Manifest) -> Path:
        """Make a folder the latest state, durably, and remove old ones. OSError: it cannot be written."""
        (fresh / MANIFEST).write_bytes(_MANIFESTS.dump_json(manifest))
        for path in fresh.rglob("*"):
            sync(path)
        sync(fresh)
        done = self._root / f"state-{self._next():08d}-{uuid.uuid4().hex[:8]}"
        fresh.rename(done)
        sync(self._root)
        self._prune()
        return done

    def latest(self) -> Iterator[tuple[Path, Manifest]]:
        """Yield the readable states, the latest first."""
        for path in self._all():
            try:
                manifest = _MANIFESTS.validate_json((path / MANIFEST).read_bytes())
            except (OSError, ValueError) as error:
                log.warning("state_unreadable", path=str(path), error=str(error))
            else:
                yield path, manifest

    def _all(self) -> list[Path]:
        if not self._root.is_dir():
            return []
        found = [path for path in self._root.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: path.name, reverse=True)

    def _next(self) -> int:
        latest = next(iter(self._all()), None)
        found = _NAME.fullmatch(latest.name) if latest is not None else None
        return int(found[1]) + 1 if found is not None else 1

    def _prune(self) -> None:
        for path in self._all()[self._keep :]:
            shutil.rmtree(path, ignore_errors=True)
        for path in self._root.glob(".*"):
            # Left by a process that died while writing; there is one writer.
            shutil.rmtree(path, ignore_errors=True)
