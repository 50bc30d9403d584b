"""Names by which verl and its processes find the integration."""

BACKEND = "paceline"
"""Name of the rollout, of the checkpoint engine, and of their `engine_kwargs`."""


def server_name(replica_rank: int) -> str:
    """Return the name of a replica's Ray actor, by which trainers find it."""
    return f"{BACKEND}_server_{replica_rank}"
