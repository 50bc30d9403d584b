"""Accept batches, stream their samples, and take in what trainers report of them."""
