"""Settings of the online learner."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from services.drafter.canary import CanaryRules
from services.drafter.gate import GateRules
from services.drafter.learning.settings import LearningSettings, Targets
from services.drafter.weighting import Weighting
from services.platform.config import ServiceConfig


class DrafterConfig(ServiceConfig):
    """Everything that can be set; see services.platform.config for what all services share."""

    port: int = 7450
    """Port of the gRPC server; 0 picks a free one."""
    instance_id: str = Field(default_factory=socket.gethostname)
    """Name in the registry. Of several that are registered one leads, and the others stand by."""
    lease_seconds: float = Field(default=5.0, ge=0.5, allow_inf_nan=False)
    """A leader that is silent for so long is succeeded by a standby."""

    model: Path
    """Model folder of the policy that the instances start with, in Hugging Face layout."""
    folder: Path
    """Where drafters and the learner's own state are kept; instances read the drafters under the same path."""
    checkpoint: Path | None = None
    """Drafter to begin with, such as the one that the instances are started with; it is published as it is. Unset:
    a fresh head, which is published once it has learned enough."""
    keep: int = Field(default=3, ge=1)
    """Drafters before the published one that are kept, to go back to."""

    interval: int = Field(default=1, ge=1)
    """Steps of training between two updates, each of which takes 1/interval of the replay buffer (Async-1)."""
    when: Literal["always", "idle"] = "always"
    """always: an update begins when it is due, beside generation. idle: when no instance has samples, for a learner
    that shares its device with an instance; it goes on to its end."""
    weighting: Weighting = Weighting.REWARD
    """How much samples count by their reward: reward, group (against those of the same prompt), or none."""
    frozen: bool = False
    """Learn nothing: only watch the published drafter. For comparison."""
    reward_wait_seconds: float = Field(default=120.0, ge=0, allow_inf_nan=False)
    """A sample without its reward is learned from after so long, with weight 1."""
    settle_seconds: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """A step is over when all its samples have their reward and nothing more of it came for so long."""
    buffer_tokens: int = Field(default=4_000_000, ge=1)
    """Tokens of the replay buffer, prompts included. When samples come faster than they are learned from, the
    oldest are dropped."""
    update_tokens: int = Field(default=262_144, ge=1)
    """Most tokens, prompts included, that one update learns from."""
    waiting_samples: int = Field(default=16_384, ge=1)
    """Samples that may wait for their reward here; while there are more, the stream is not read."""
    held_out_share: float = Field(default=0.125, gt=0, lt=1)
    """Share of the prompts whose samples are never learned from, but drafters measured on."""
    held_out_tokens: int = Field(default=65_536, ge=1)
    """Tokens of the held-out samples that are kept, the latest."""
    evaluate_every: int = Field(default=1, ge=1)
    """Updates between two looks whether the drafter is better than the published one."""
    save_every: int = Field(default=1, ge=1)
    """Updates between two saves of the learner's state. Samples are acknowledged when they are part of one."""

    publish_margin: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    """Share by which a drafter must be better than the published one, in acceptance length on held-out samples."""
    publish_samples: int = Field(default=8, ge=1)
    """Held-out samples that must be there to say so."""
    publish_first: float = Field(default=1.1, ge=0, allow_inf_nan=False)
    """Acceptance length that the first drafter must have, where none was given."""
    publish_rest: int = Field(default=3, ge=0)
    """Updates after a roll-back in which nothing is published."""
    canary_seconds: float = Field(default=600.0, ge=0, allow_inf_nan=False)
    """How long the acceptance of a new drafter is watched on live traffic."""
    canary_tokens: int = Field(default=8192, ge=1)
    """Drafted tokens after which it has passed before that."""
    canary_least_tokens: int = Field(default=64, ge=1)
    """Drafted tokens below which nothing is said of it."""
    canary_collapse: float = Field(default=0.6, gt=0, lt=1)
    """It has collapsed, and the one before is published again, when its acceptance rate is certainly below this
    share of what it was before."""
    report_seconds: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """How often instances are asked what became of their drafts."""
    load_timeout_seconds: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Longest time that an instance has to take a drafter; then it is tried again."""

    nice: int = Field(default=10, ge=0, le=19)
    """How much the training process yields to others on shared cores, as of nice(1)."""
    threads: int = Field(default=0, ge=0)
    """Threads of the training process; 0: torch's own choice."""
    gap_seconds: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Longest time between two steps of a run that counts as the trainer's."""

    device: str = "cpu"
    """Of training: cpu, cuda or cuda:N."""
    depth: int = Field(default=5, ge=1)
    """Places that training unrolls and evaluation drafts."""
    draft_vocabulary: int = Field(default=32_000, ge=1)
    """Most tokens that the drafter can draft."""
    lr: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Learning rate. Unset: by the width of the policy."""
    epochs: int = Field(default=1, ge=1)
    """Times that an update goes over its samples."""
    batch_tokens: int = Field(default=4096, ge=1)
    """Response tokens of an optimizer step, about."""
    micro_tokens: int = Field(default=4096, ge=1)
    """Tokens, padding included, of one pass through the policy."""
    targets: Targets = Targets.POLICY
    """What is learned: policy, its whole distribution; topk, its most likely tokens."""
    top_k: int = Field(default=20, ge=1)
    """Of topk."""

    @field_validator("model", "folder", "checkpoint")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        # Others are told of what lies there.
        return None if path is None else path.absolute()

    @property
    def checkpoints(self) -> Path:
        """Folder of the drafters."""
        return self.folder / "checkpoints"

    @property
    def states(self) -> Path:
        """Folder of the learner's own state."""
        return self.folder / "state"

    def learning(self) -> LearningSettings:
        """The part that learning goes by."""
        return LearningSettings(
            depth=self.depth,
            draft_vocabulary=self.draft_vocabulary,
            lr=self.lr,
            epochs=self.epochs,
            batch_tokens=self.batch_tokens,
            micro_tokens=self.micro_tokens,
            targets=self.targets,
            top_k=self.top_k,
            device=self.device,
        )

    def gate(self) -> GateRules:
        """The part that publication goes by."""
        return GateRules(
            margin=self.publish_margin,
            least_first=self.publish_first,
            least_rollouts=self.publish_samples,
            rest=self.publish_rest,
        )

    def canary(self) -> CanaryRules:
        """The part that the canary goes by."""
        return CanaryRules(
            collapse=self.canary_collapse,
            least_tokens=self.canary_least_tokens,
            tokens=self.canary_tokens,
            seconds=self.canary_seconds,
        )
