"""Work that takes time by the size or the content of a request: done in processes of its own, never on the loop."""
