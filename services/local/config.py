"""What a local platform consists of."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from paceline.channel import Tls
from services.local.restarts import RestartPolicy


@dataclass(frozen=True, slots=True)
class PlatformConfig:
    """A gateway, instances, draft stores, a bubble coordinator, a policy service, a reallocator, perhaps an online
    learner, and a Redis, all on this machine."""

    model: Path
    """Model folder in Hugging Face layout."""
    instances: int = 2
    port: int = 0
    """The gateway's; 0 picks a free one."""
    redis_url: str | None = None
    """None starts an embedded server of its own."""
    folder: Path = Path("runs/local")
    """Where logs and the draft stores' snapshots go."""
    draft_stores: int = 1
    """Replicas of the draft store; 0: nothing is kept of earlier steps."""
    bubbles: bool = True
    """Pre-generate coming steps in the bubbles of a step, and while the trainer learns."""
    policy: bool = True
    """Knobs that can be changed while the platform runs, and decisions that are explained."""
    reallocator: bool = True
    """Move running samples from crowded instances to those that have few, and off one that is to stop."""
    learner: bool = False
    """Draft with an EAGLE-3 head as well, and train it while the platform runs."""
    drafter: Path | None = None
    """With `learner`: the head to begin with. None: a fresh one is made, or the one in `folder` is used."""
    token: str | None = None
    """Bearer token that every process asks for; None asks for none (loopback only)."""
    tokens_file: Path | None = None
    """Hashed tokens that the gateway accepts besides, with their scopes."""
    tls: Tls | None = None
    """Mutual TLS between all processes, and to the gateway: authority, certificate (for 127.0.0.1) and key. None:
    plain text."""
    instance_options: tuple[str, ...] = ()
    """More flags for every instance, such as ("--max-num-seqs", "64")."""
    gateway_options: tuple[str, ...] = ()
    draft_options: tuple[str, ...] = ()
    """More flags for every draft store, such as ("--budget-bytes", "67108864")."""
    bubble_options: tuple[str, ...] = ()
    policy_options: tuple[str, ...] = ()
    reallocator_options: tuple[str, ...] = ()
    learner_options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    """More environment variables for every process."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    pin: bool = True
    """On CPU, share the cores out among the instances, so that none disturbs another."""
    restarts: RestartPolicy | None = None
    """How processes that died are started again; None leaves them dead."""
    start_timeout: float = 240.0
    """Seconds within which every process must be ready."""
    stop_timeout: float = 15.0
    """Seconds that a process has to stop by itself before it is killed."""

    @property
    def logs(self) -> Path:
        """Folder of one log file per process."""
        return self.folder / "logs"

    @property
    def drafters(self) -> Path:
        """Folder of the learner: heads, and its own state. It lasts as long as the Redis, as `snapshots` does."""
        return self.folder / "drafter"

    @property
    def snapshots(self) -> Path:
        """Folder of one snapshot per draft store. They last as long as the Redis that goes with them: an
        embedded one is new at every start, and so they are then."""
        return self.folder / "drafts"
