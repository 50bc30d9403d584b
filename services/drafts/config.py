"""Settings of a replica of the draft store."""

from __future__ import annotations

import socket
from pathlib import Path

from pydantic import Field

from services.platform.config import ServiceConfig


class DraftsConfig(ServiceConfig):
    """Everything that can be set; see services.platform.config for what all services share."""

    port: int = 7410
    """Port of the gRPC server; 0 picks a free one."""
    replica_id: str = Field(default_factory=socket.gethostname, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Stable name of the replica: prompts are shared out by it. A process that comes back under it finds
    the snapshot of its predecessor."""
    budget_bytes: int = Field(default=2 << 30, ge=1 << 20)
    """Memory for rollouts, their overhead included; services.drafts.store says what is evicted above it.
    While a snapshot is being written, it holds on to what is evicted meanwhile."""
    history_versions: int = Field(default=2, ge=1)
    """Versions of a slot's history that are kept."""
    snapshot_dir: Path | None = None
    """Folder of the snapshots, one file for each replica. Unset: a restart begins empty."""
    snapshot_interval_seconds: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """How often a snapshot is written when something has changed; what came since is lost in a crash."""

    @property
    def snapshot_path(self) -> Path | None:
        """The file of this replica's snapshot."""
        return None if self.snapshot_dir is None else self.snapshot_dir / f"{self.replica_id}.drafts"
