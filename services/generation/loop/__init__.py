"""The thread that owns the engine: running samples, their streams, and one step after the other."""
