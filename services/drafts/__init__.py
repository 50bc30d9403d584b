"""The draft store: rollouts that can be drafts, spread over replicas; and the index over them, a library."""
