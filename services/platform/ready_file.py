"""Ready file: JSON that a process writes for its launcher once it takes calls."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessEndpoint:
    """Process id and addresses of a ready process."""

    pid: int
    address: str
    """host:port of its gRPC server."""
    metrics_port: int


def write_ready_file(path: Path, address: str, metrics_port: int) -> None:
    """Write the endpoint of this process; a reader never sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(json.dumps(asdict(ProcessEndpoint(os.getpid(), address, metrics_port))))
    part.replace(path)


def read_ready_file(path: Path | None) -> ProcessEndpoint | None:
    """Return the endpoint of a ready process; None before it is ready."""
    if path is None or not path.exists():
        return None
    values = json.loads(path.read_text())
    return ProcessEndpoint(values["pid"], values["address"], values["metrics_port"])
