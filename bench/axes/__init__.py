"""Measure what drafts are worth by length, vocabulary, entropy, KL of an update, and age of the history."""
