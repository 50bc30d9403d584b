"""W4A16: weights in 4 bits, rounded to nearest by groups of columns; activations in 16 bits (or float32).

Ours is the rounding, at every update of the weights. The product is vLLM's Machete or Marlin where they take it.

- weight.py: the format
- reference.py: what quantising, dequantising and multiplying mean
- quantise.py, matmul.py: the entry functions
- cpu_product.py: the product on a CPU, by torch's kernel
- triton_quantise.py: the kernel that rounds
"""

from kernels.w4a16.linear import CpuW4Weight, for_cpu, matmul, matmul_cpu, quantise
from kernels.w4a16.weight import GROUPS, W4Weight, dequantise

__all__ = ["GROUPS", "CpuW4Weight", "W4Weight", "dequantise", "for_cpu", "matmul", "matmul_cpu", "quantise"]
