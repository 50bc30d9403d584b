"""Benchmark of the tokens that change with the shape of a batch, in float32 and in bfloat16."""
