"""Modes of speculation: the mechanisms that choose how many draft tokens a step verifies."""
