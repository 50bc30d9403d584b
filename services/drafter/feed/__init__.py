"""Input of training: the feed, samples joined with their rewards, and the replay buffer."""
