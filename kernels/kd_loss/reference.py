"""Reward-weighted distillation in plain PyTorch, differentiable by autograd."""

from __future__ import annotations

import torch


def kd_loss_reference(
    student: torch.Tensor, teacher: torch.Tensor, weights: torch.Tensor, temperature: float
) -> torch.Tensor:
    """weights * KL(teacher || student) of each row, [T] float32; see loss.kd_loss for every rule."""
    counted = weights != 0
    # Left out before anything is computed, so that nothing of such a row can spoil a gradient.
    student, teacher = (
        torch.where(counted.unsqueeze(1), logits.float() / temperature, 0.0) for logits in (student, teacher)
    )
    log_p, log_q = teacher.detach().log_softmax(dim=-1), student.log_softmax(dim=-1)
    p = log_p.exp()
    divergence = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(dim=-1)
    # The condition above is false for NaN as well.
    divergence = torch.where((log_p.isnan() | log_q.isnan()).any(dim=-1), torch.nan, divergence)
    return torch.where(counted, weights * divergence, 0.0)
