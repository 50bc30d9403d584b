"""Coupled sampling: tokens by the Gumbel-max trick with noise that is a function of (seed, position, token).

noise.py specifies the noise and reference.py the sample. sample.py, the entry, samples a step where its logits are:
on CUDA by triton_sample.py, on a CPU by cpu.py, which needs numba and is therefore not imported here.
"""

from kernels.coupled_sampler.noise import Domain, Purpose, gumbel, uniform
from kernels.coupled_sampler.reference import INVALID, UNSAMPLED, coupled_argmax_reference, verify

__all__ = [
    "INVALID",
    "UNSAMPLED",
    "Domain",
    "Purpose",
    "coupled_argmax_reference",
    "gumbel",
    "uniform",
    "verify",
]
