"""Rollouts of other instances and earlier steps: fetched from the draft store, cached, and matched with samples."""
