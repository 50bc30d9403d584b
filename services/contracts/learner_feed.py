"""Entries of the stream from the gateway to the learner: finished samples, their rewards, and ends of batches.

Pure: entries in and out. Tokens are packed uint32, so that an entry costs little more than they do.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from services.contracts.gateway_keys import BatchKey


@dataclass(frozen=True, slots=True)
class FedSample:
    """Sample of an EXACT batch that ended by itself.

    Tokens are ids of the policy's vocabulary, and `response` has at least one. `seed` is that of its noise (64 bit,
    unsigned), None where it was not sampled at temperature 1 from the whole distribution.
    """

    batch: BatchKey
    prompt_id: str
    slot: int
    seed: int | None
    policy_version: int
    prompt: tuple[int, ...]
    response: tuple[int, ...]

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Name of the sample among all."""
        return (*self.batch, self.prompt_id, self.slot)

    @property
    def tokens(self) -> int:
        """Number of tokens of prompt and response."""
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True, slots=True)
class FedRewards:
    """Rewards of finished samples of a batch, by prompt id and slot."""

    batch: BatchKey
    rewards: Mapping[tuple[str, int], float]


@dataclass(frozen=True, slots=True)
class FedBatchEnd:
    """End of all samples of a batch, after the entries of those that are fed."""

    batch: BatchKey


Fed = FedSample | FedRewards | FedBatchEnd


def encode(fed: Fed) -> dict[str, bytes]:
    """Return the fields of its entry."""
    if isinstance(fed, FedBatchEnd):
        return {"ended": json.dumps(fed.batch, separators=(",", ":")).encode()}
    if isinstance(fed, FedRewards):
        rewards = [[prompt_id, slot, reward] for (prompt_id, slot), reward in fed.rewards.items()]
        return {"rewards": json.dumps([*fed.batch, rewards], separators=(",", ":")).encode()}
    head = [*fed.batch, fed.prompt_id, fed.slot, fed.seed, fed.policy_version]
    return {
        "sample": json.dumps(head, separators=(",", ":")).encode(),
        "prompt": array("I", fed.prompt).tobytes(),
        "response": array("I", fed.response).tobytes(),
    }


def decode(fields: Mapping[bytes, bytes]) -> Fed:
    """Parse the result of `encode`. ValueError if it is not an entry of the feed."""
    try:
        if b"ended" in fields:
            run_id, batch_id = json.loads(fields[b"ended"])
            return FedBatchEnd((str(run_id), str(batch_id)))
        if b"rewards" in fields:
            run_id, batch_id, rewards = json.loads(fields[b"rewards"])
            found = {(str(prompt_id), int(slot)): float(reward) for prompt_id, slot, reward in rewards}
            return FedRewards((str(run_id), str(batch_id)), found)
        run_id, batch_id, prompt_id, slot, seed, version = json.loads(fields[b"sample"])
        prompt, response = _tokens(fields[b"prompt"]), _tokens(fields[b"response"])
        if not response:
            raise ValueError("no response")
        batch = (str(run_id), str(batch_id))
        noise = None if seed is None else int(seed)
        return FedSample(batch, str(prompt_id), int(slot), noise, int(version), prompt, response)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an entry of the feed: {error!r}") from error


def size_of(fed: Fed) -> int:
    """Return the approximate bytes of an entry in memory."""
    if isinstance(fed, FedSample):
        return 256 + 4 * fed.tokens
    return 64 * (1 + len(fed.rewards)) if isinstance(fed, FedRewards) else 64


def _tokens(packed: bytes) -> tuple[int, ...]:
    if len(packed) % 4:
        raise ValueError(f"{len(packed)} bytes are no tokens")
    return tuple(array("I", packed))
