"""Several deployments that serve one training job: which prompts each gets, and work on all of them at once."""

from paceline.shards.members import OpenShard, Shard, Shards, assign, layout, shards_of

__all__ = ["OpenShard", "Shard", "Shards", "assign", "layout", "shards_of"]
