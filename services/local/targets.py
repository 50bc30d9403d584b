"""Where the processes' metrics are, as a file that Prometheus discovers its targets from."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from pathlib import Path

from services.local.child import Child

NAME = "targets.json"
"""In the platform's folder; deploy/prometheus/prometheus.yml reads it."""


def targets(children: Iterable[Child], *, tls: bool) -> str:
    """The contents of the file: the processes that have been ready, each under its name."""
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
    """Kept up to date, by any thread; whoever reads it sees all of it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._written = ""
        self._lock = threading.Lock()

    def write(self, children: Iterable[Child], *, tls: bool) -> None:
        """Writes the file if its contents have changed."""
        with self._lock:
            text = targets(children, tls=tls)
            if text != self._written:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                part = self.path.with_suffix(".part")
                part.write_text(text)
                part.replace(self.path)
                self._written = text
