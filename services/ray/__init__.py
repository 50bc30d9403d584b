"""The platform on a Ray cluster: the very same processes as elsewhere, each looked after by a detached actor."""
