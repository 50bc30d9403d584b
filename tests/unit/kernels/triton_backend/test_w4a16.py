"""4-bit weights are bit for bit the reference's."""

import pytest
import torch

from kernels.w4a16 import dequantise, quantise

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_weight(rows, columns, dtype, device):
    weight = torch.randn(rows, columns).to(dtype)
    weight[1] = 0
    weight[2] = 3
    weight[0, ::2] = -0.125
    weight[3] *= 1e-6
    return weight.to(device)


@pytest.mark.parametrize("dtype", DTYPES)
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
