"""Reward-weighted knowledge distillation, which trains a drafter (ReSpec), and its plain reference.

    loss = kd_loss(student_logits, teacher_logits, rewards).sum() / rewards.sum()
    loss.backward()

The vocabulary is read once forwards and once backwards, and no probability is ever in memory: besides the logits
there is only the gradient, which the backward pass returns.
"""

from __future__ import annotations

import math

import torch

from kernels.backend import FLOATS, Backend, check, check_contiguous, check_device, choose


def kd_loss_reference(
    student: torch.Tensor, teacher: torch.Tensor, weights: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return weights * KL(teacher || student) of each row, [T] float32; see `kd_loss` for every rule."""
    counted = weights != 0
    # Excluded before anything is computed, so that such a row cannot spoil a gradient.
    student, teacher = (
        torch.where(counted.unsqueeze(1), logits.float() / temperature, 0.0) for logits in (student, teacher)
    )
    log_p, log_q = teacher.detach().log_softmax(dim=-1), student.log_softmax(dim=-1)
    p = log_p.exp()
    divergence = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(dim=-1)
    # The condition above is false for NaN as well.
    divergence = torch.where((log_p.isnan() | log_q.isnan()).any(dim=-1), torch.nan, divergence)
    return torch.where(counted, weights * divergence, 0.0)


def kd_loss(
    student: torch.Tensor,
    teacher: torch.Tensor,
    weights: torch.Tensor,
    *,
    temperature: float = 1.0,
    backend: Backend | str | None = None,
) -> torch.Tensor:
    """Return weights * KL(softmax(teacher / temperature) || softmax(student / temperature)) of each token.

    Args:
        student: [T, V] float32, bfloat16 or float16 logits, the last axis contiguous; T may be 0.
        teacher: [T, V] likewise, perhaps of another dtype; no gradient. -inf is a probability of 0.
        weights: [T] float32, of any sign; a row of weight 0 is not read: its loss and gradient are 0.
        temperature: positive; the loss is not multiplied by its square.
        backend: see kernels/backend.py.

    Returns:
        [T] float32, with gradients for student and weights. inf where the student excludes an entry that the
        teacher does not; NaN for a row with a NaN, or of a teacher that excludes everything.

    Raises:
        ValueError: a wrong shape, dtype, device or temperature.
    """
    check("student", student, (None, None), FLOATS)
    check("teacher", teacher, tuple(student.shape), FLOATS)
    check("weights", weights, (len(student),), (torch.float32,))
    check_contiguous(student=student, teacher=teacher, weights=weights)
    check_device(student.device, teacher=teacher, weights=weights)
    if student.shape[1] == 0:
        raise ValueError("student must have at least one column")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    if choose(student.device, backend) is Backend.REFERENCE:
        return kd_loss_reference(student, teacher, weights, temperature)
    from kernels.kd_loss.triton_kd import FusedLoss

    return FusedLoss.apply(student, teacher, weights, temperature)
