"""Worker processes for jobs that are too slow for the event loop, by the size or the content of a request."""
