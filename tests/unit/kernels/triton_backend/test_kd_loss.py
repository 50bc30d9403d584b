"""The fused loss and its gradients are the reference's, in every corner that the reference defines."""

import pytest
import torch

from kernels.kd_loss import kd_loss
from kernels.tuning import Tuning, using

INFINITY = float("inf")


def make_rows(width):
    """Student and teacher [6, width]: plain, left out, one-sided, with masked tokens, excluded, far apart."""
    student = torch.randn(6, width) * 3
    teacher = student + torch.randn(6, width) * 0.3
    student[1] = float("nan")
    if width > 1:
        teacher[2, 1:] = -INFINITY
        teacher[3, width // 2] = student[3, width // 2] = -INFINITY
        student[4, 0] = -INFINITY
        student[5, 1] = 100
    return student, teacher


def losses_and_gradients(student, teacher, weights, temperature, up, backend):
    student, weights = student.clone().requires_grad_(), weights.clone().requires_grad_()
    loss = kd_loss(student, teacher, weights, temperature=temperature, backend=backend)
    loss.backward(up)
    return loss.detach(), student.grad, weights.grad


@pytest.mark.parametrize("width", [1, 5, 300])
@pytest.mark.parametrize(
    ("of_student", "of_teacher"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)],
)
def test_losses_and_gradients_are_the_references(width, of_student, of_teacher, device):
    torch.manual_seed(width)
    student, teacher = make_rows(width)
    student, teacher = student.to(device, of_student), teacher.to(device, of_teacher)
    weights = torch.tensor([1.0, 0.0, -2.0, 0.5, 3.0, 1.0], device=device)
    up = torch.randn(6, device=device)
    arguments = (student, teacher, weights, 1.7, up)
    expected = losses_and_gradients(*arguments, "reference")
    with using(Tuning(loss_block=64)):
        found = losses_and_gradients(*arguments, "triton")
    narrow = of_student != torch.float32
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        rough = narrow and i == 1
        torch.testing.assert_close(
            ours, theirs, equal_nan=True, rtol=1e-2 if rough else 1e-5, atol=1e-3 if rough else 3e-5
        )


def test_an_empty_batch_has_no_losses(device):
    empty = torch.empty(0, 7, device=device, requires_grad=True)
    loss = kd_loss(empty, empty.detach(), torch.empty(0, device=device), backend="triton")
    assert loss.shape == (0,)
    loss.sum().backward()
    assert empty.grad.shape == (0, 7)
