"""vLLM with its CUDA kernels, made small enough to be brought to a GPU machine that has no network."""
