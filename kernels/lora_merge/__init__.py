"""A low-rank product added to a matrix, the same on every machine.

- merge.py: the kernel, for one processor
- reference.py: the same sums in plain numpy

The order of a matrix product's sums is a library's own, and differs between processors and numbers of threads. Here
it is part of the definition: float32, by ascending rank, each product and each sum rounded once.
"""

from kernels.lora_merge.merge import add_product

__all__ = ["add_product"]
