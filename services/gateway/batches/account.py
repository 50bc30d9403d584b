"""Accounts: the token on whose name samples are in work, and the most tokens that they may come to. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from paceline.v1 import rollout_pb2, sample_pb2


@dataclass(frozen=True, slots=True)
class Account:
    """Name of the token that a batch was accepted for, and the model's length then."""

    name: str
    model_len: int

    def to_text(self) -> str:
        """Return what the journal has of it, so that a successor counts its samples, too."""
        return f"{self.model_len}:{self.name}"

    @classmethod
    def from_text(cls, stored: str) -> Self | None:
        """Return what `to_text` had; None where it is empty: nobody's."""
        length, _, name = stored.partition(":")
        return cls(name, int(length)) if name else None

    def most_tokens(self, prompt_tokens: int, sampling: sample_pb2.SamplingParams) -> int:
        """Return the most tokens that a sample may come to, prompt and response."""
        if not sampling.HasField("max_tokens"):
            return self.model_len
        return min(self.model_len, prompt_tokens + sampling.max_tokens)

    def tokens_of(self, groups: Iterable[rollout_pb2.Group], sampling: sample_pb2.SamplingParams) -> int:
        """Return the most tokens that groups may come to, with these parameters unless they have their own."""
        return sum(
            group.samples
            * self.most_tokens(
                len(group.prompt_token_ids), group.sampling if group.HasField("sampling") else sampling
            )
            for group in groups
        )
