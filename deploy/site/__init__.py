"""Pages of the documentation site that are written when it is built."""
