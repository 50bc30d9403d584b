"""Run the quick form of every benchmark in a night, and write the documents that show the figures."""
