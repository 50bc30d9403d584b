"""Batches of a training job: submitted, opened, read, and used as sessions."""
