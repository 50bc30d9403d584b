"""Coupled sampling: tokens by the Gumbel-max trick with noise that is a function of (seed, position, token).

- noise.py: the specification of the noise and its plain reference
- reference.py: the definition of a coupled sample
- cpu.py: the fast CPU path: coupled_argmax, coupled_verify, warm_up
- verify.py: acceptance of drafts, given the target's tokens
"""

from kernels.coupled_sampler.cpu import coupled_argmax, coupled_verify, warm_up
from kernels.coupled_sampler.noise import Domain, Purpose, gumbel, uniform
from kernels.coupled_sampler.reference import INVALID, coupled_argmax_reference
from kernels.coupled_sampler.verify import UNSAMPLED, verify

__all__ = [
    "INVALID",
    "UNSAMPLED",
    "Domain",
    "Purpose",
    "coupled_argmax",
    "coupled_argmax_reference",
    "coupled_verify",
    "gumbel",
    "uniform",
    "verify",
    "warm_up",
]
