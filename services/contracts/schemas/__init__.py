"""JSON schemas that samples can follow."""
