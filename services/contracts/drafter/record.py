"""Record of the published drafter in Redis: the leading learner writes it, starting instances read it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import structlog
from pydantic import TypeAdapter
from redis.asyncio import Redis

from services.contracts.drafter.keys import DrafterKeys

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PublishedDrafter:
    """A drafter that instances should use.

    `path` is a checkpoint folder (see services/contracts/drafter/checkpoint.py) and `sha256` the digest of its
    model.safetensors in hexadecimal. `acceptance_length` was measured on held-out samples (tokens per
    verification), `policy_version` is the version it learned from last, and `at` the time of publishing in unix
    seconds. `before` has the live drafts, drafted tokens and accepted tokens of the version that it replaced.
    """

    version: int
    path: str
    sha256: str
    acceptance_length: float = 0.0
    policy_version: int = 0
    at: float = 0.0
    before: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class DrafterHistory:
    """The published drafter, and those published before it for rollbacks, the latest first."""

    current: PublishedDrafter | None = None
    earlier: tuple[PublishedDrafter, ...] = ()

    def to_json(self) -> str:
        """Return the record as one JSON object."""
        return _HISTORY.dump_json(self).decode()

    @staticmethod
    def from_json(text: str | bytes) -> DrafterHistory:
        """Read `to_json`, ignoring fields of later versions. ValueError: it is not such a record."""
        return _HISTORY.validate_json(text)

    def with_published(self, new: PublishedDrafter, keep: int) -> DrafterHistory:
        """Return the history after publishing a drafter, with `keep` of the earlier ones."""
        before = (self.current,) if self.current is not None else ()
        return DrafterHistory(new, (*before, *self.earlier)[:keep])

    def rolled_back(self) -> DrafterHistory | None:
        """Return the history after a rollback, without the drafter left; None if there is no earlier one."""
        return DrafterHistory(self.earlier[0], self.earlier[1:]) if self.earlier else None


_HISTORY = TypeAdapter(DrafterHistory)


async def read_published(redis: Redis, namespace: str) -> PublishedDrafter | None:
    """Return the drafter that instances should use; None if none was published. Raises what Redis raises.

    An unreadable record counts as none: an instance keeps the drafter that it was started with.
    """
    return (await read_history(redis, namespace)).current


async def read_history(redis: Redis, namespace: str) -> DrafterHistory:
    """Return the published drafter and those before it, as `read_published` does."""
    text: Any = await redis.get(DrafterKeys(namespace).published)
    if text is None:
        return DrafterHistory()
    try:
        return DrafterHistory.from_json(text)
    except ValueError as error:
        log.warning("drafter_record_unreadable", error=str(error))
        return DrafterHistory()
