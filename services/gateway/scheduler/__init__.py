"""Place the samples of running batches on instances, and apply what the instances report."""
