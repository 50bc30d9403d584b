"""Drafts of the quantized copy: their worth by format, what they cost here, and where they would pay on GPUs."""
