"""Rounding weights to 4 bits: errors are bounded, and the format is the one that is written down."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.w4a16 import GROUPS, W4Weight, dequantise, for_cpu, matmul, matmul_cpu, quantise
from kernels.w4a16.weight import pack, unpack

# Half a step, and what rounding the scale clips at the ends of the range.
STEPS = {torch.float32: 0.5001, torch.float16: 0.505, torch.bfloat16: 0.54}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 5),
    columns=st.integers(1, 300),
    group=st.sampled_from(GROUPS),
    symmetric=st.booleans(),
    dtype=st.sampled_from(list(STEPS)),
    shift=st.sampled_from([0.0, 3.0, -100.0]),
)
def test_a_weight_is_off_by_at_most_half_a_step(seed, rows, columns, group, symmetric, dtype, shift):
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, columns, generator=generator) + shift).to(dtype)
    quantised = quantise(weight, group, symmetric=symmetric)
    error = (dequantise(quantised, torch.float64) - weight.double()).abs()
    steps = quantised.scales.double().repeat_interleave(group, dim=1)[:, :columns]
    assert (error <= STEPS[dtype] * steps).all()


def test_zero_stays_zero_in_every_scheme():
    weight = torch.zeros(2, 64)
    weight[1, :32] = torch.linspace(0.1, 5, 32)
    for symmetric in (True, False):
        assert (dequantise(quantise(weight, 32, symmetric=symmetric))[:, 32:] == 0).all()


def test_the_whole_range_of_float32_is_taken():
    weight = torch.tensor([[3e38, -3e38] + [0.0] * 30])
    for symmetric in (True, False):
        assert torch.isfinite(dequantise(quantise(weight, 32, symmetric=symmetric), torch.float64)).all()


def test_words_hold_eight_columns_lowest_bits_first():
    q = torch.arange(10).unsqueeze(0) % 16
    assert pack(q).tolist() == [[0x76543210, 0x98]]
    assert unpack(pack(q), 10).tolist() == q.tolist()
    full = torch.full((1, 8), 15)
    assert pack(full).tolist() == [[-1]]
    assert unpack(pack(full), 8).tolist() == full.tolist()


def test_memory_is_a_quarter_of_bfloat16_and_the_scales():
    quantised = quantise(torch.randn(64, 1024).bfloat16(), 128)
    assert quantised.nbytes == 64 * 1024 // 2 + 64 * 8 * 2


def test_product_is_that_of_the_dequantised_weight():
    quantised = quantise(torch.randn(40, 100), 32, symmetric=False)
    x = torch.randn(3, 100)
    torch.testing.assert_close(matmul(x, quantised), x @ dequantise(quantised).T)
    assert matmul(x[:0], quantised).shape == (0, 40)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantise(torch.randn(3)), r"weight must have shape \[any, any\]"),
        (lambda: quantise(torch.randn(3, 4), 100), "group must be one of"),
        (lambda: quantise(torch.randn(3, 4).int()), "weight must be float32, bfloat16, float16"),
        (lambda: quantise(torch.randn(4, 3).T), "last axis of weight must be contiguous"),
        (lambda: quantise(torch.randn(0, 4)), "at least one row"),
        (lambda: quantise(torch.full((1, 32), torch.nan), 32), "finite"),
        (lambda: quantise(torch.full((1, 32), 1e38), 32, scale_dtype=torch.float16), "within scale_dtype"),
        (
            lambda: matmul(torch.randn(2, 31), quantise(torch.randn(4, 32), 32)),
            r"x must have shape \[any, 32\]",
        ),
        (
            lambda: W4Weight(torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 2), None, 32, 32),
            r"scales must have shape \[2, 1\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_on_a_cpu_is_that_of_the_weight_in_bfloat16(symmetric, dtype):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(48, 128, generator=generator) + 0.3
    rounded = quantise(weight, 64, symmetric=symmetric, scale_dtype=torch.bfloat16)
    x = torch.randn(5, 128, generator=generator).to(dtype)
    found, exact = matmul_cpu(x, for_cpu(rounded)), matmul(x, rounded).float()
    assert found.dtype == dtype
    assert (found.float() - exact).abs().max() < 0.02 * exact.abs().max()
    assert for_cpu(rounded).nbytes == 48 * 128 // 2 + 48 * 2 * 4


def test_a_weight_that_the_cpu_s_product_does_not_take_is_refused():
    with pytest.raises(ValueError, match="does not fit"):
        for_cpu(quantise(torch.randn(5, 64), 32, scale_dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="scales must be bfloat16"):
        for_cpu(quantise(torch.randn(16, 64), 32))
