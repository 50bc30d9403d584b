"""State of batches, samples and updates, as plain data. Pure."""
