"""A low-rank product added to a matrix, with the same result on every machine.

The order of sums in a library's matrix product differs between processors and numbers of threads. Here it is part
of the definition: float32, by ascending rank, each product and each sum rounded once.
"""

from kernels.lora_merge.merge import add_product

__all__ = ["add_product"]
