"""The quick form of every benchmark in a night, and the documents that its figures stand in."""
