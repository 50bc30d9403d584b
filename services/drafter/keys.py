"""Names of the learner's keys in Redis. They share one hash tag: each script touches one slot of a cluster."""

from __future__ import annotations

from dataclasses import dataclass

GROUP = "learner"
"""The consumer group of the feed."""
CONSUMER = "leader"
"""Its one consumer: whoever leads goes on with what its predecessor had taken."""


@dataclass(frozen=True, slots=True)
class DrafterKeys:
    """Keys of one deployment."""

    namespace: str

    @property
    def lease(self) -> str:
        """String: who leads."""
        return f"{self.namespace}:{{drafter}}:lease"

    @property
    def published(self) -> str:
        """String: the published drafter and those before it, as JSON."""
        return f"{self.namespace}:{{drafter}}:published"

    @property
    def version(self) -> str:
        """String: the highest version that was ever given out."""
        return f"{self.namespace}:{{drafter}}:version"

    @property
    def feed(self) -> str:
        """Stream: finished samples and their rewards."""
        return f"{self.namespace}:{{drafter}}:feed"
