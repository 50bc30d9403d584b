"""Configuration of a local platform."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from paceline.transport.channel import Tls

LOG_BYTES = 32 << 20


class DeviceChoice(StrEnum):
    """Device of the instances; auto: GPUs if there are any and vLLM is built for them."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Restarts with exponential backoff, up to a limit."""

    limit: int = 5
    """Restarts of one process within the window; after that it stays dead."""
    window: float = 300.0
    """Seconds after which a death is forgotten."""
    initial: float = 0.5
    """Seconds before the first restart; doubles with each further death within the window."""
    maximum: float = 30.0
    """Most seconds before a restart."""


@dataclass(frozen=True, slots=True)
class PlatformConfig:
    """Services of a platform on this machine, and their options."""

    model: Path
    """Model folder in Hugging Face layout."""
    instances: int = 2
    gateways: int = 1
    """Gateways: one leads, the others are standbys. Clients find the leader."""
    port: int = 0
    """Port of the first gateway; 0 picks a free one."""
    redis_url: str | None = None
    """None starts an embedded server for this platform."""
    folder: Path = Path("runs/local")
    """Folder of logs, of the draft stores' snapshots and of the learner."""
    draft_stores: int = 1
    """Replicas of the draft store; 0: no rollouts are kept for later steps."""
    bubbles: bool = True
    """Pre-generate coming steps in bubbles: at the end of a step, and while the trainer updates the policy."""
    policy: bool = True
    """Run the policy service: knobs that can be changed while the platform runs, and explained decisions."""
    reallocator: bool = True
    """Move running samples from loaded instances to idle ones, and off one that drains."""
    learner: bool = False
    """Draft also with an EAGLE-3 head that is trained while the platform runs."""
    drafter: Path | None = None
    """With `learner`: the first EAGLE-3 head. None: the one in `folder`, or else a fresh one."""
    token: str | None = None
    """Bearer token that every process requires. None: the one in the environment (PACELINE_TOKEN, or the file
    PACELINE_TOKEN_FILE), or else a new one."""
    no_token: bool = False
    """Require no token: every user of this machine can read samples and change weights."""
    tokens_file: Path | None = None
    """Hashed tokens that the gateway also accepts, with their scopes."""
    tls: Tls | None = None
    """Mutual TLS between all processes, and to the gateway: authority, certificate (for 127.0.0.1) and key. None:
    plain text."""
    http_port: int | None = None
    """Port of the HTTP facade, 0 picks a free one; None: there is none."""
    served_model_name: str | None = None
    """Names of the model over HTTP, separated by commas. None: the folder, as instances report it."""
    instance_options: tuple[str, ...] = ()
    """More flags for every instance, such as ("--max-num-seqs", "64")."""
    gateway_options: tuple[str, ...] = ()
    draft_options: tuple[str, ...] = ()
    """More flags for every draft store, such as ("--budget-bytes", "67108864")."""
    bubble_options: tuple[str, ...] = ()
    policy_options: tuple[str, ...] = ()
    reallocator_options: tuple[str, ...] = ()
    learner_options: tuple[str, ...] = ()
    facade_options: tuple[str, ...] = ()
    shared_weights: bool = True
    """Let the instances keep weights in one folder; otherwise each has its own, as on hosts that share no disk."""
    environment: dict[str, str] = field(default_factory=dict)
    """More environment variables for every process."""
    device: DeviceChoice = DeviceChoice.AUTO
    pin: bool = True
    """On CPU, pin each instance to its share of the cores, so that none slows another down."""
    restarts: RestartPolicy | None = None
    """Restart policy of processes that died; None leaves them dead."""
    start_timeout: float = 240.0
    """Seconds within which every process must be ready."""
    stop_timeout: float = 15.0
    """Seconds that a process has to stop by itself before it is killed."""
    log_bytes: int = LOG_BYTES
    """Size at which the log of a process is rotated."""
    log_files: int = 4
    """Files of each log: the current one and older ones, of which the oldest is deleted."""

    @property
    def logs(self) -> Path:
        """Folder with one log file per process."""
        return self.folder / "logs"

    @property
    def drafters(self) -> Path:
        """Folder of the learner: EAGLE-3 heads and its state. It lasts as long as Redis, as `snapshots` does."""
        return self.folder / "drafter"

    @property
    def snapshots(self) -> Path:
        """Folder with one snapshot per draft store.

        Snapshots last as long as their Redis: with an embedded one, both are new at every start.
        """
        return self.folder / "drafts"

    @property
    def adopted(self) -> Path:
        """Folder of the weights that the instances keep; it lasts as long as Redis, as `snapshots` does."""
        return self.folder / "adopted"
