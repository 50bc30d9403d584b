"""Read and write the learner's records in Redis: its feed of finished samples, and the published drafter.

The gateway writes entries of the feed. The leading learner writes the record of the published drafter, and
starting instances read it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import structlog
from pydantic import TypeAdapter
from redis.asyncio import Redis

from services.contracts.gateway_keys import BatchKey

log = structlog.get_logger(__name__)

GROUP = "learner"
"""Consumer group of the feed."""
CONSUMER = "leader"
"""The only consumer: a leader continues with the entries that its predecessor had read."""


class DrafterKeys:
    """Keys of the learner in one deployment."""

    def __init__(self, namespace: str) -> None:
        prefix = f"{namespace}:{{drafter}}"
        self.lease = f"{prefix}:lease"
        """String: term of the leader."""
        self.published = f"{prefix}:published"
        """String: the published drafter and its predecessors, as JSON."""
        self.version = f"{prefix}:version"
        """String: the highest version given out so far."""
        self.feed = f"{prefix}:feed"
        """Stream: finished samples and their rewards."""


@dataclass(frozen=True, slots=True)
class FedSample:
    """Sample of an EXACT batch that ended by itself.

    Tokens are ids of the policy's vocabulary, and `response` has at least one. `seed` seeded its noise (64 bit,
    unsigned); None if it was not sampled at temperature 1 from the whole distribution.
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
        """Unique name of the sample."""
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
    """End of a batch, after the entries of its samples."""

    batch: BatchKey


Fed = FedSample | FedRewards | FedBatchEnd


def encode_entry(fed: Fed) -> dict[str, bytes]:
    """Return the fields of a stream entry."""
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


def decode_entry(fields: Mapping[bytes, bytes]) -> Fed:
    """Parse the result of `encode_entry`; ValueError if it is not an entry of the feed."""
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


def entry_bytes(fed: Fed) -> int:
    """Return the approximate bytes of an entry in memory."""
    if isinstance(fed, FedSample):
        return 256 + 4 * fed.tokens
    return 64 * (1 + len(fed.rewards)) if isinstance(fed, FedRewards) else 64


def _tokens(packed: bytes) -> tuple[int, ...]:
    if len(packed) % 4:
        raise ValueError(f"{len(packed)} bytes are no tokens")
    return tuple(array("I", packed))


@dataclass(frozen=True, slots=True)
class PublishedDrafter:
    """A drafter that instances should use.

    `path` is a checkpoint folder (see services/contracts/drafter_checkpoint.py) and `sha256` the digest of its
    model.safetensors in hexadecimal. `acceptance_length` was measured on held-out samples (tokens per
    verification), `policy_version` is the latest version it was trained on, and `at` is the time of publishing in
    unix seconds. `before` has the live drafts, drafted tokens and accepted tokens of the version that it replaced.
    `rolled_back_from` is the version that a rollback to this drafter replaced; 0: it was published by itself.
    """

    version: int
    path: str
    sha256: str
    acceptance_length: float = 0.0
    policy_version: int = 0
    at: float = 0.0
    before: tuple[int, int, int] = (0, 0, 0)
    rolled_back_from: int = 0


@dataclass(frozen=True, slots=True)
class DrafterHistory:
    """The published drafter, and its predecessors for rollbacks, latest first."""

    current: PublishedDrafter | None = None
    earlier: tuple[PublishedDrafter, ...] = ()

    def to_json(self) -> str:
        """Return the record as one JSON object."""
        return _HISTORY.dump_json(self).decode()

    @staticmethod
    def from_json(text: str | bytes) -> DrafterHistory:
        """Read `to_json`, ignoring fields of later versions; ValueError if it is not such a record."""
        return _HISTORY.validate_json(text)

    def with_published(self, new: PublishedDrafter, keep: int) -> DrafterHistory:
        """Return the history after publishing a drafter, with `keep` of the earlier ones."""
        before = (self.current,) if self.current is not None else ()
        return DrafterHistory(new, (*before, *self.earlier)[:keep])

    def rolled_back(self) -> DrafterHistory | None:
        """Return the history after a rollback, without the current drafter; None if there is no earlier one."""
        return DrafterHistory(self.earlier[0], self.earlier[1:]) if self.earlier else None


_HISTORY = TypeAdapter(DrafterHistory)


async def read_published(redis: Redis, namespace: str) -> PublishedDrafter | None:
    """Return the drafter that instances should use; None if none was published. Raises errors of Redis.

    An unreadable record counts as none: instances keep the drafter that they were started with.
    """
    return (await read_history(redis, namespace)).current


async def read_history(redis: Redis, namespace: str) -> DrafterHistory:
    """Return the published drafter and its predecessors, as `read_published` does."""
    text: Any = await redis.get(DrafterKeys(namespace).published)
    if text is None:
        return DrafterHistory()
    try:
        return DrafterHistory.from_json(text)
    except ValueError as error:
        log.warning("drafter_record_unreadable", error=str(error))
        return DrafterHistory()
