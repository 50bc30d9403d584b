"""Speculation by knobs: the modes, what they may use, and the account of what they did. Engine thread only."""
