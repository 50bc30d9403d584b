"""Drafters: sources of draft tokens, one folder each."""
