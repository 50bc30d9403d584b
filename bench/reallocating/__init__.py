"""Cost of the reallocator's decisions in a large fleet."""
