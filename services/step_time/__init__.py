"""Predict how long an engine step takes, and learn it from measurements."""
