"""Coupled sampling: tokens by the Gumbel-max trick with noise that is a function of (seed, position, token).

- noise.py: the specification of the noise and its plain reference
- reference.py: the definition of a coupled sample
- cpu.py: the fast CPU path: coupled_argmax, coupled_verify, warm_up; not imported here, since it needs numba
- sample.py: masks, noise, arg-max and verification of a step, where the logits are
- verify.py: acceptance of drafts, given the target's tokens
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
