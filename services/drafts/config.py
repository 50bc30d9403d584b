"""Settings of a replica of the draft store."""

from __future__ import annotations

import socket
from pathlib import Path

from pydantic import Field

from services.platform.config import Port, ServiceConfig


class DraftsConfig(ServiceConfig):
    """Settings of a replica, in addition to the settings that all services share."""

    port: Port = 7410
    """Port of the gRPC server; 0 picks a free one."""
    replica_id: str = Field(default_factory=socket.gethostname, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Stable name of the replica, which determines its share of the prompts. A process that is restarted under this
    name finds the snapshot of its predecessor."""
    budget_bytes: int = Field(default=2 << 30, ge=1 << 20)
    """Memory for rollouts, including overhead. Above it rollouts are evicted, in the order that
    services.drafts.store
    describes. While a snapshot is written, evicted rollouts stay in memory."""
    history_versions: int = Field(default=2, ge=1)
    """Policy versions that are kept of a slot's history."""
    snapshot_dir: Path | None = None
    """Folder of the snapshots, one file per replica. Unset: a restarted store is empty."""
    snapshot_interval_seconds: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Interval of snapshots; a crash loses the rollouts since the last one."""

    @property
    def snapshot_path(self) -> Path | None:
        """The file of this replica's snapshot."""
        return None if self.snapshot_dir is None else self.snapshot_dir / f"{self.replica_id}.drafts"
