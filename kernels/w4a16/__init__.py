"""W4A16: weights in 4 bits, rounded to nearest by groups of columns; activations in 16 bits (or float32).

The rounding, at every update of the weights, is ours (linear.py, triton_quantise.py; weight.py has the format and
the reference). The product is vLLM's Machete or Marlin where they support it, else torch's.
"""

from kernels.w4a16.linear import CpuW4Weight, for_cpu, matmul, matmul_cpu, quantise
from kernels.w4a16.weight import GROUPS, W4Weight, dequantise

__all__ = ["GROUPS", "CpuW4Weight", "W4Weight", "dequantise", "for_cpu", "matmul", "matmul_cpu", "quantise"]
