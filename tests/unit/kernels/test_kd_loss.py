"""The reference of the distillation loss against float64, and what is refused."""

import pytest
import torch

from kernels.kd_loss import kd_loss


def exact(student, teacher, temperature):
    """KL in float64, by its definition."""
    p = (teacher.double() / temperature).softmax(-1)
    difference = (teacher.double() / temperature).log_softmax(-1) - (
        student.double() / temperature
    ).log_softmax(-1)
    return (p * difference).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_losses_and_gradients_are_those_of_float64(temperature):
    student = (torch.randn(5, 300) * 4).requires_grad_()
    teacher, weights = torch.randn(5, 300) * 4, torch.tensor([1.0, -2.0, 0.5, 7.0, 0.0])
    loss = kd_loss(student, teacher, weights, temperature=temperature)
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    wide = student.detach().double().requires_grad_()
    expected = exact(wide, teacher, temperature) * weights
    (by_float64,) = torch.autograd.grad(expected.sum(), wide)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), by_float64, rtol=1e-4, atol=1e-6)


def test_a_student_equal_to_its_teacher_has_nothing_to_learn():
    logits = torch.randn(3, 100)
    student = logits.clone().requires_grad_()
    loss = kd_loss(student, logits, torch.ones(3)).sum()
    loss.backward()
    assert loss == 0
    assert student.grad.abs().max() < 1e-7


def test_rows_without_weight_are_not_looked_at():
    student, teacher = torch.randn(3, 10), torch.randn(3, 10)
    student[1], teacher[1] = torch.nan, -torch.inf
    student.requires_grad_()
    loss = kd_loss(student, teacher, torch.tensor([1.0, 0.0, 1.0]))
    loss.sum().backward()
    assert loss[1] == 0
    assert student.grad[1].abs().max() == 0
    assert torch.isfinite(student.grad).all()


def test_what_the_teacher_excludes_costs_nothing_and_what_the_student_excludes_costs_all():
    teacher = torch.tensor([[1.0, 2.0, -torch.inf], [1.0, 2.0, 3.0]])
    student = torch.tensor([[1.0, 2.0, -torch.inf], [1.0, 2.0, -torch.inf]])
    assert kd_loss(student, teacher, torch.ones(2)).tolist() == [0, torch.inf]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher": torch.zeros(2, 4)}, r"teacher must have shape \[2, 5\]"),
        ({"weights": torch.zeros(2, dtype=torch.float64)}, "weights must be float32"),
        ({"student": torch.zeros(5, 2).T}, "last axis of student must be contiguous"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": float("nan")}, "temperature must be positive"),
        ({"student": torch.zeros(2, 0), "teacher": torch.zeros(2, 0)}, "at least one column"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    arguments = {"student": torch.zeros(2, 5), "teacher": torch.zeros(2, 5), "weights": torch.ones(2)}
    with pytest.raises(ValueError, match=message):
        kd_loss(**arguments | change)
