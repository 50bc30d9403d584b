"""A cluster without machines: loads of samples run through the reallocator's own plan."""
