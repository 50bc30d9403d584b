"""Reward-weighted distillation over a large vocabulary, without a tensor of probabilities."""

from kernels.kd_loss.loss import kd_loss

__all__ = ["kd_loss"]
