"""Compare the modes of speculation on a real engine, in paired rounds."""
