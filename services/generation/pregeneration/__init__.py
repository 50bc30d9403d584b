"""Pre-generation: samples of a coming step, generated in the background and kept as drafts."""
