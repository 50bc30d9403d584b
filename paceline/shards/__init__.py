"""Several deployments that serve one training job: which prompts each gets, and work on all of them at once."""

from paceline.shards.assignment import Shard, assign, layout, shards_of
from paceline.shards.members import OpenShard, Shards

__all__ = ["OpenShard", "Shard", "Shards", "assign", "layout", "shards_of"]
