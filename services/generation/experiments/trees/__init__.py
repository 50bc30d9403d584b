"""Draft trees: proposals with branches, and their plans. The part in the engine is its experiment `trees`."""
