"""Report of a run: entries of the decision log in, one HTML page out."""
