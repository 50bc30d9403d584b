"""Redis keys of the learner. They share one hash tag, so that each script uses one slot of a cluster."""

from __future__ import annotations

GROUP = "learner"
"""Consumer group of the feed."""
CONSUMER = "leader"
"""Its one consumer: a leader continues with the entries that its predecessor had read."""


class DrafterKeys:
    """Keys of one deployment."""

    def __init__(self, namespace: str) -> None:
        prefix = f"{namespace}:{{drafter}}"
        self.lease = f"{prefix}:lease"
        """String: who leads."""
        self.published = f"{prefix}:published"
        """String: the published drafter and those before it, as JSON."""
        self.version = f"{prefix}:version"
        """String: the highest version that was ever given out."""
        self.feed = f"{prefix}:feed"
        """Stream: finished samples and their rewards."""
