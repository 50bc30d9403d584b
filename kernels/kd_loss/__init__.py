"""Reward-weighted distillation over a large vocabulary, without a tensor of probabilities.

- loss.py: the entry function
- reference.py: plain PyTorch
- triton_kd.py: the kernels, as an autograd function
"""

from kernels.kd_loss.loss import kd_loss

__all__ = ["kd_loss"]
