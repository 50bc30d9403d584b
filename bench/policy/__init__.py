"""Modes of speculation on a real engine, compared in paired rounds."""
