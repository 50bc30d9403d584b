"""Pack vLLM with its CUDA kernels, small enough for a GPU machine without network."""
