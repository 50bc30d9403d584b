"""A machine with one H100, as far as it can be pretended: its libraries answer, and no program runs on it."""
