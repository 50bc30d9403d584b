"""Where guesses come from and which of them are verified. Pure: no engine, no clock, no I/O."""
