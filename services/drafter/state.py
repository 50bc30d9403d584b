"""What the learner has on disk of itself: weights and optimizer, and which samples are in them.

A state appears complete or not at all. It names the samples that it has learned from and that the feed may not know
to be acknowledged: whoever goes on from it neither learns from them twice nor leaves them out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

LEARNER, MANIFEST = "learner", "manifest.json"
"""In the folder of a state: what the learner writes, and the rest."""
_NAME = re.compile(r"state-(\d{8,})-[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What goes with the learner's weights.

    `used`: entries of the feed that were learned from and are perhaps not acknowledged yet. `forced`: see
    services/drafter/buffer.py. `since_roll_back`: updates since the last one; None: there was none.
    """

    updates: int = 0
    policy_version: int = 0
    samples_used: int = 0
    tokens_used: int = 0
    rejected: int = 0
    roll_backs: int = 0
    since_roll_back: int | None = None
    kd_loss: float = 0.0
    used: tuple[str, ...] = ()
    forced: tuple[int, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Reads it from a state's folder. ValueError or OSError when there is none that can be read."""
        values = json.loads((path / MANIFEST).read_text())
        if not isinstance(values, dict):
            raise ValueError(f"{path / MANIFEST} is no manifest")
        known = {each.name for each in fields(cls)}
        chosen = {name: value for name, value in values.items() if name in known}
        for name in ("used", "forced"):
            chosen[name] = tuple(chosen.get(name, ()))
        return cls(**chosen)


class States:
    """The states under one folder. What is there may be of an earlier process."""

    def __init__(self, root: Path, keep: int = 2) -> None:
        self._root = root
        self._keep = keep

    def new(self) -> Path:
        """A folder to write the next state into: the learner's part under LEARNER. OSError: no room."""
        path = self._root / f".{uuid.uuid4().hex}"
        path.mkdir(parents=True)
        return path

    def commit(self, fresh: Path, manifest: Manifest) -> Path:
        """Makes it the latest state, and removes old ones. OSError: the disk does not take it."""
        (fresh / MANIFEST).write_text(json.dumps(asdict(manifest)))
        for path in fresh.rglob("*"):
            _sync(path)
        _sync(fresh)
        done = self._root / f"state-{self._next():08d}-{uuid.uuid4().hex[:8]}"
        fresh.rename(done)
        _sync(self._root)
        self._prune()
        return done

    def latest(self) -> Iterator[tuple[Path, Manifest]]:
        """The states that can be read, the latest first."""
        for path in self._all():
            try:
                yield path, Manifest.read(path)
            except (OSError, ValueError, TypeError) as error:
                log.warning("state_unreadable", path=str(path), error=str(error))

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
            # Of a process that died while it wrote: there is one writer.
            shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
