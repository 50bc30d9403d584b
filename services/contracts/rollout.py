"""Rollout record: the tokens of a sample, stored for later use as a draft. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.uint32]
Logprobs = NDArray[np.float32]


class RolloutKind(enum.StrEnum):
    """Origin of a rollout."""

    PREGENERATED = "pregenerated"
    """Generated ahead of its step with the seed that the sample will have; possibly incomplete."""
    HISTORY = "history"
    """A finished sample of an earlier step."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredRollout:
    """Response tokens of one sample of a prompt, made under one policy version.

    Its name in the store is (run_id, prompt_id, slot, kind), for HISTORY with version, for PREGENERATED with fork.
    """

    run_id: str
    prompt_id: str
    slot: int
    """Index of the sample in its group."""
    version: int
    """Policy version of the weights that generated it, or verified it last."""
    kind: RolloutKind
    step: int
    """Step for which it was generated."""
    seed: int
    """Seed of its noise: a sample with the same seed agrees with it as far as the policies do."""
    tokens: Tokens
    """uint32 [n], n >= 1."""
    logprobs: Logprobs
    """float32 [n], natural logarithms under `version`; [0] when not known (PREGENERATED only)."""
    finished: bool
    """True if the last token ended the response; otherwise the rollout is incomplete."""
    fork: int = 0
    """0, or 1 + the position at which a pre-generated rollout takes the runner-up of a near-tie.

    Such a fork is a draft of the same sample, in case the updated policy takes the runner-up.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of tokens and log-probabilities."""
        return self.tokens.nbytes + self.logprobs.nbytes
