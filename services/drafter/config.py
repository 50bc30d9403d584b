"""Settings of the online learner."""

from __future__ import annotations

import socket
from dataclasses import fields
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from services.drafter.learning.data import LearningSettings, Targets, Weighting
from services.platform.config import LeaderConfig, Port


class DrafterConfig(LeaderConfig):
    """Settings of the learner; services.platform.config has those that all services share."""

    port: Port = 7450
    """Port of the gRPC server; 0 picks a free one."""
    instance_id: str = Field(default_factory=socket.gethostname)
    """Name in the registry. Of several registered processes one leads and the others stand by."""
    model: Path
    """Model folder of the policy that the instances start with, in Hugging Face layout."""
    folder: Path
    """Folder of drafters and of the learner's state; instances read the drafters under the same path."""
    checkpoint: Path | None = None
    """Drafter to begin with, such as the one that instances start with; it is published as it is. Unset: a fresh
    head, which is published once it has learned enough."""
    keep: int = Field(default=3, ge=1)
    """Drafters before the published one that are kept for rollbacks."""

    interval: int = Field(default=1, ge=1)
    """Steps of training between two updates, each of which takes 1/interval of the replay buffer (Async-1)."""
    when: Literal["always", "idle"] = "always"
    """always: an update begins when it is due, during generation. idle: only while no instance has samples, for a
    learner that shares its device with an instance; an update that has begun runs to its end."""
    weighting: Weighting = Weighting.NONE
    """Weights of samples by their reward: none (rewards are not waited for), reward, or group (relative to the same
    prompt)."""
    frozen: bool = False
    """Do not train, only watch the published drafter. For comparison."""
    reward_wait_seconds: float = Field(default=120.0, ge=0, allow_inf_nan=False)
    """Time after which a sample without its reward is learned from, with weight 1. Without weighting: time without
    news after which a batch is over whose end was not reported."""
    settle_seconds: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Time without news after which a step is over, if all its samples have their rewards. Not used without
    weighting."""
    buffer_tokens: int = Field(default=4_000_000, ge=1)
    """Tokens of the replay buffer, prompts included. If samples arrive faster than they are learned from, the
    oldest are dropped."""
    update_tokens: int = Field(default=262_144, ge=1)
    """Most tokens of one update, prompts included."""
    waiting_samples: int = Field(default=16_384, ge=1)
    """Most samples that wait for their reward; while there are more, the feed is not read."""
    held_out_share: float = Field(default=0.125, gt=0, lt=1)
    """Share of the prompts that are never learned from, and on whose samples drafters are evaluated."""
    held_out_tokens: int = Field(default=65_536, ge=1)
    """Tokens of the latest held-out samples that are kept."""
    evaluate_every: int = Field(default=1, ge=1)
    """Updates between two evaluations of the drafter against the published one."""
    save_every: int = Field(default=1, ge=1)
    """Updates between two saves of the state. Samples are acknowledged once they are part of a state."""

    publish_margin: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    """Share by which the acceptance length on held-out samples must exceed the published drafter's."""
    publish_samples: int = Field(default=8, ge=1)
    """Held-out samples required for the comparison."""
    publish_first: float = Field(default=1.1, ge=0, allow_inf_nan=False)
    """Acceptance length required of the first drafter if none is configured."""
    publish_cooldown: int = Field(default=3, ge=0)
    """Updates after a rollback in which nothing is published."""
    canary_seconds: float = Field(default=600.0, ge=0, allow_inf_nan=False)
    """Longest time for which the live acceptance of a new drafter is watched."""
    canary_tokens: int = Field(default=8192, ge=1)
    """Drafted tokens after which a new drafter has passed earlier."""
    canary_least_tokens: int = Field(default=64, ge=1)
    """Fewest drafted tokens for a judgement of a new drafter."""
    canary_collapse: float = Field(default=0.6, gt=0, lt=1)
    """A new drafter has collapsed and is rolled back if its acceptance rate is certainly below this share of the
    rate before."""
    report_seconds: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Interval at which live acceptance is fetched from instances."""
    load_timeout_seconds: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Deadline of loading a drafter on an instance; then it is tried again."""

    nice: int = Field(default=10, ge=0, le=19)
    """Niceness of the training process, as of nice(1): it yields to others on shared cores."""
    threads: int = Field(default=0, ge=0)
    """Threads of the training process; 0: torch's own choice."""
    gap_seconds: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Longest time between two steps of a run that counts as the trainer's work."""

    device: str = "cpu"
    """Device of training: cpu, cuda or cuda:N."""
    depth: int = Field(default=5, ge=1)
    """Draft length in training and evaluation."""
    draft_vocabulary: int = Field(default=32_000, ge=1)
    """Most tokens in the draft vocabulary."""
    lr: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Learning rate. Unset: chosen by the width of the policy."""
    epochs: int = Field(default=1, ge=1)
    """Passes of an update over its samples."""
    batch_tokens: int = Field(default=4096, ge=1)
    """Approximate response tokens of an optimizer step."""
    micro_tokens: int = Field(default=4096, ge=1)
    """Most tokens, padding included, of one forward pass of the policy."""
    acceptance_share: float = Field(default=0.8, ge=0, le=1)
    """Share of the loss that is the probability that a draft token is rejected; the rest is the divergence from the
    policy (0: plain distillation)."""
    targets: Targets = Targets.POLICY
    """Targets of distillation: policy (its whole distribution) or topk (its most likely tokens)."""
    top_k: int = Field(default=20, ge=1)
    """Number of tokens with targets topk."""

    @field_validator("model", "folder", "checkpoint")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        # Other processes, with other working directories, receive these paths.
        return None if path is None else path.absolute()

    @property
    def checkpoints(self) -> Path:
        """Folder of the drafters."""
        return self.folder / "checkpoints"

    @property
    def states(self) -> Path:
        """Folder of the learner's states."""
        return self.folder / "state"

    def learning(self) -> LearningSettings:
        """Return the settings of training: those with the same names."""
        return LearningSettings(**self.model_dump(include={each.name for each in fields(LearningSettings)}))
