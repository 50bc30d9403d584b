"""Draft store: keeps rollouts for later use as drafts, spread over replicas."""
