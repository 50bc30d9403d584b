"""Platform on a Ray cluster: the same processes as elsewhere, each supervised by a detached actor."""
