"""The distillation loss in Triton: one pass forwards, one backwards.

Forwards, each lane of a program keeps of its part of a row, for both models, the maximum m and the sum Z of
exp(logit - m), and of the teacher's weights the sum A of exp(t - m) * (t - s), all rescaled when a maximum rises.
From the sums of all lanes

    KL = A / Z_teacher - logsumexp(teacher) + logsumexp(student)

Backwards, the gradient of the student's logits is weight * (softmax(student) - softmax(teacher)) / temperature,
from the two sums of the forward pass.
"""

# mypy: disable-error-code="no-untyped-def,import-untyped"
# Triton's functions carry types that annotations cannot say.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton_math import narrow
from kernels.tuning import Tuning, tuning


class FusedLoss(torch.autograd.Function):
    """kd_loss by the kernels; differentiable once."""

    @staticmethod
    def forward(
        ctx: Any, student: torch.Tensor, teacher: torch.Tensor, weights: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        """Return losses, [T] float32."""
        tokens, width = student.shape
        chosen = tuning(student.device)
        divergence, student_sum, teacher_sum = torch.empty(
            3, tokens, dtype=torch.float32, device=student.device
        )
        if tokens:
            _forward[(tokens,)](
                student, teacher, weights, divergence, student_sum, teacher_sum,
                student.stride(0), teacher.stride(0), width, 1.0 / temperature,
                BLOCK=_block(chosen, width), STAGES=chosen.loss_stages,
                num_warps=chosen.loss_warps, enable_fp_fusion=True,
            )  # fmt: skip
        ctx.save_for_backward(student, teacher, weights, divergence, student_sum, teacher_sum)
        ctx.temperature = temperature
        return torch.where(weights == 0, 0.0, weights * divergence)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None, None]:
        """Return gradients of student and weights."""
        student, teacher, weights, divergence, student_sum, teacher_sum = ctx.saved_tensors
        tokens, width = student.shape
        of_student = of_weights = None
        if ctx.needs_input_grad[0]:
            of_student = torch.empty(tokens, width, dtype=student.dtype, device=student.device)
            if tokens:
                chosen = tuning(student.device)
                block = _block(chosen, width)
                _backward[(tokens, triton.cdiv(width, block))](
                    student, teacher, weights, grad.contiguous(), student_sum, teacher_sum, of_student,
                    student.stride(0), teacher.stride(0), width, 1.0 / ctx.temperature,
                    BLOCK=block, num_warps=chosen.loss_warps, enable_fp_fusion=True,
                )  # fmt: skip
        if ctx.needs_input_grad[2]:
            of_weights = torch.where(weights == 0, 0.0, grad * divergence)
        return of_student, None, of_weights, None


def _block(chosen: Tuning, width: int) -> int:
    return min(chosen.loss_block, max(16, triton.next_power_of_2(width)))


@triton.jit
def _forward(
    student, teacher, weights, divergence, student_sum, teacher_sum,
    student_stride, teacher_stride, width, inverse, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    result = tl.full((), 0.0, tl.float32)
    log_s, log_t = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    if tl.load(weights + token) != 0.0:
        # Eight neighbours are one load of a thread: each lane sums its own, and all lanes are summed at the end.
        offset = 8 * tl.arange(0, BLOCK // 8)[:, None] + tl.arange(0, 8)[None, :]
        m_s, m_t = (
            tl.full((BLOCK // 8,), -float("inf"), tl.float32),
            tl.full((BLOCK // 8,), -float("inf"), tl.float32),
        )
        z_s, z_t = tl.zeros((BLOCK // 8,), tl.float32), tl.zeros((BLOCK // 8,), tl.float32)
        a = tl.zeros((BLOCK // 8,), tl.float32)
        for start in tl.range(0, width, BLOCK, num_stages=STAGES):
            inside = start + offset < width
            s = tl.load(student + token * student_stride + start + offset, mask=inside, other=-float("inf"))
            t = tl.load(teacher + token * teacher_stride + start + offset, mask=inside, other=-float("inf"))
            s, t = s.to(tl.float32) * inverse, t.to(tl.float32) * inverse
            new_s, new_t = tl.maximum(m_s, tl.max(s, axis=1)), tl.maximum(m_t, tl.max(t, axis=1))
            base_s = tl.where(new_s > -float("inf"), new_s, 0.0)
            base_t = tl.where(new_t > -float("inf"), new_t, 0.0)
            share = tl.exp(t - base_t[:, None])
            fade = tl.exp(m_t - base_t)
            z_s = z_s * tl.exp(m_s - base_s) + tl.sum(tl.exp(s - base_s[:, None]), axis=1)
            z_t = z_t * fade + tl.sum(share, axis=1)
            # An entry without a share adds nothing, even if the difference is infinite.
            a = tl.where(fade > 0.0, a * fade, 0.0) + tl.sum(
                tl.where(share > 0.0, share * (t - s), 0.0), axis=1
            )
            m_s, m_t = new_s, new_t
        # A row with a NaN has one in a sum.
        spoiled = tl.max(((z_s != z_s) | (z_t != z_t)).to(tl.int32), axis=0)
        top_s, top_t = tl.max(m_s, axis=0), tl.max(m_t, axis=0)
        base_s = tl.where(top_s > -float("inf"), top_s, 0.0)
        base_t = tl.where(top_t > -float("inf"), top_t, 0.0)
        fade = tl.exp(m_t - base_t)
        log_s = top_s + tl.log(tl.sum(z_s * tl.exp(m_s - base_s), axis=0))
        sum_t = tl.sum(z_t * fade, axis=0)
        log_t = top_t + tl.log(sum_t)
        total = tl.sum(tl.where(fade > 0.0, a * fade, 0.0), axis=0)
        result = tl.where(spoiled > 0, float("nan"), total / sum_t - log_t + log_s)
    tl.store(divergence + token, result)
    tl.store(student_sum + token, log_s)
    tl.store(teacher_sum + token, log_t)


@triton.jit
def _backward(
    student, teacher, weights, grads, student_sum, teacher_sum, out,
    student_stride, teacher_stride, width, inverse, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < width
    weight = tl.load(weights + token)
    result = tl.zeros((BLOCK,), tl.float32)
    if weight != 0.0:
        factor = tl.load(grads + token) * weight * inverse
        s = tl.load(student + token * student_stride + offset, mask=inside, other=-float("inf"))
        t = tl.load(teacher + token * teacher_stride + offset, mask=inside, other=-float("inf"))
        q = tl.exp(s.to(tl.float32) * inverse - tl.load(student_sum + token))
        p = tl.exp(t.to(tl.float32) * inverse - tl.load(teacher_sum + token))
        result = factor * (q - p)
    tl.store(out + token * width + offset, narrow(result, out.dtype.element_ty), mask=inside)
