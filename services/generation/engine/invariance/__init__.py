"""Logits on CPU that do not depend on the batch: the option `batch_invariant`."""
