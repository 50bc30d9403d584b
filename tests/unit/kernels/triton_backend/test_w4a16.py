"""4-bit weights: bit for bit the reference's, and products within rounding of float64."""

import pytest
import torch

from kernels.w4a16 import dequantise, matmul, quantise
from kernels.w4a16.triton_matmul import matmul_triton

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def make_weight(rows, columns, dtype, device):
    weight = torch.randn(rows, columns).to(dtype)
    weight[1] = 0
    weight[2] = 3
    weight[0, ::2] = -0.125
    weight[3] *= 1e-6
    return weight.to(device)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("group", "rows", "columns"), [(128, 33, 300), (32, 70, 33), (256, 5, 520)])
def test_quantises_to_the_references_bits(dtype, symmetric, group, rows, columns, device):
    weight = make_weight(rows, columns, dtype, device)
    expected = quantise(weight.cpu(), group, symmetric=symmetric, backend="reference")
    found = quantise(weight, group, symmetric=symmetric, backend="triton")
    assert torch.equal(found.packed.cpu(), expected.packed)
    assert torch.equal(found.scales.cpu(), expected.scales)
    if not symmetric:
        assert torch.equal(found.zeros.cpu(), expected.zeros)


def test_rounds_ties_to_even(device):
    weight = torch.tensor([[7.5, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.0] + [0.0] * 24], device=device)
    found = dequantise(quantise(weight, 32, backend="triton"))
    assert found[0, :8].tolist() == [7.0, 0.0, 2.0, 2.0, 0.0, -2.0, -2.0, 0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_refuses_weights_that_are_not_finite(bad, device):
    weight = torch.randn(4, 64, device=device)
    weight[2, 5] = bad
    for symmetric in (True, False):
        with pytest.raises(ValueError, match="finite"):
            quantise(weight, 32, symmetric=symmetric, backend="triton")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("rows", "symmetric", "group", "outputs", "columns"),
    [(1, True, 128, 70, 264), (17, False, 32, 33, 300), (64, False, 256, 64, 520)],
)
@pytest.mark.parametrize("programs", [1, 8])
def test_product_is_within_rounding_of_float64(
    dtype, rows, symmetric, group, outputs, columns, programs, device
):
    weight = quantise(make_weight(outputs, columns, dtype, device), group, symmetric=symmetric)
    x = torch.randn(rows, columns).to(dtype).to(device)
    exact = x.double() @ dequantise(weight, torch.float64).T
    found = matmul_triton(x, weight, programs_wanted=programs).double()
    assert ((found - exact).abs().max() / exact.abs().max()) < TOLERANCE[dtype]


def test_more_rows_than_the_kernel_takes_are_multiplied_all_the_same(device):
    weight = quantise(torch.randn(40, 96, device=device), 32)
    x = torch.randn(65, 96, device=device)
    found = matmul(x, weight, backend="triton")
    torch.testing.assert_close(found, matmul(x, weight, backend="reference"), rtol=1e-4, atol=1e-4)
