"""The suffix index beside arctic-inference's suffix cache."""
