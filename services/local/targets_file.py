"""File of scrape targets, by which Prometheus finds the processes of a local platform.

deploy/prometheus/prometheus.yml reads it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from pathlib import Path

from services.local.child import Child

NAME = "targets.json"
"""Name of the file in the platform's folder."""


def targets(children: Iterable[Child], *, tls: bool) -> str:
    """Return the contents of the file: the processes that are ready, labelled with their names."""
    scheme = {"__scheme__": "https"} if tls else {}
    listed = [
        {
            "targets": [f"{child.ready.address.rpartition(':')[0]}:{child.ready.metrics_port}"],
            "labels": {"instance": child.spec.name, **scheme},
        }
        for child in children
        if child.ready is not None
    ]
    return json.dumps(listed, indent=1) + "\n"


class TargetsFile:
    """Targets file of one platform, written by any thread; a reader never sees a part of it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._written = ""
        self._lock = threading.Lock()

    def write(self, children: Iterable[Child], *, tls: bool) -> None:
        """Write the file if its contents have changed."""
        with self._lock:
            text = targets(children, tls=tls)
            if text != self._written:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                part = self.path.with_suffix(".part")
                part.write_text(text)
                part.replace(self.path)
                self._written = text
