"""Reward-weighted knowledge distillation: what a drafter is trained with (ReSpec, reward-weighted KD).

    loss = kd_loss(student_logits, teacher_logits, rewards).sum() / rewards.sum()
    loss.backward()

The vocabulary is read once forwards and once backwards, and no probability is ever in memory: beside the logits
there is only the gradient, which the backward pass returns.
"""

from __future__ import annotations

import math

import torch

from kernels.backend import Backend, choose
from kernels.checks import FLOATS, check, check_contiguous, check_device
from kernels.kd_loss.reference import kd_loss_reference


def kd_loss(
    student: torch.Tensor,
    teacher: torch.Tensor,
    weights: torch.Tensor,
    *,
    temperature: float = 1.0,
    backend: Backend | str | None = None,
) -> torch.Tensor:
    """weights * KL(softmax(teacher / temperature) || softmax(student / temperature)) of each token.

    Args:
        student: [T, V] float32, bfloat16 or float16 logits, the last axis contiguous; T may be 0.
        teacher: [T, V] likewise, perhaps of another dtype; no gradient. -inf is a probability of 0.
        weights: [T] float32, of any sign; a row of weight 0 is not looked at: its loss and gradient are 0.
        temperature: positive; the loss is not multiplied by its square.
        backend: see kernels/backend.py.

    Returns:
        [T] float32, with gradients for student and weights. inf where the student excludes what the teacher does
        not; NaN for a row with a NaN, or of a teacher that excludes everything.

    Raises:
        ValueError: a shape, dtype, device or temperature that does not fit.
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
