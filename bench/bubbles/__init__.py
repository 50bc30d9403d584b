"""Bubbles filled with drafts of the next step, against plain decoding."""
