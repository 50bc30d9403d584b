"""Kernels that give wrong tokens are found out before they serve."""

import logging

import pytest

from kernels import backend, selfcheck
from kernels.backend import Backend, KernelMismatch
from kernels.coupled_sampler import triton_sample
from kernels.kv_pack import triton_copy
from kernels.selfcheck import check_kv_pack, check_sampler, check_w4a16
from kernels.w4a16 import triton_quantise
from services.generation.engine import kernel_choice
from services.generation.engine.kernel_choice import use_kernels


@pytest.fixture(autouse=True)
def switch(monkeypatch):
    monkeypatch.setattr(backend, "_chosen", Backend.AUTO)


@pytest.mark.parametrize("first", [2, pytest.param(0, marks=pytest.mark.soak)], ids=["harder cases", "all"])
def test_kernels_that_pass_their_check_are_used(first, device, monkeypatch):
    cases = selfcheck._cases()[first:]
    monkeypatch.setattr(selfcheck, "_cases", lambda: cases)
    assert use_kernels("triton", device) is Backend.TRITON


def test_wrong_kernels_are_an_error_or_left_out(device, monkeypatch, caplog):
    cases = selfcheck._cases()[2:3]
    monkeypatch.setattr(selfcheck, "_cases", lambda: cases)
    real = triton_sample.sample_triton

    def of_other_seeds(logits, vectors, *rest):
        real(logits, {**vectors, "seeds": vectors["seeds"] + 1}, *rest)

    monkeypatch.setattr(triton_sample, "sample_triton", of_other_seeds)
    with pytest.raises(KernelMismatch, match="the reference"):
        check_sampler(device)
    with pytest.raises(KernelMismatch):
        use_kernels("triton", device)
    # What `auto` comes to on CUDA.
    monkeypatch.setattr(kernel_choice, "choose", lambda _: Backend.TRITON)
    with caplog.at_level(logging.WARNING):
        assert use_kernels("auto", device) is Backend.REFERENCE
    assert "kernels_left_out: sampler: KernelMismatch" in caplog.text
    assert kernel_choice.failed() == ("sampler",)
    # The next choice begins anew.
    monkeypatch.setattr(kernel_choice, "choose", lambda _: Backend.REFERENCE)
    use_kernels("reference", device)
    assert kernel_choice.failed() == ()


def test_wrong_integers_and_wrong_copies_are_found_out(device, monkeypatch):
    real = triton_quantise.quantise_triton
    monkeypatch.setattr(triton_quantise, "quantise_triton", lambda weight, *rest: real(-weight, *rest))
    with pytest.raises(KernelMismatch, match="quantising"):
        check_w4a16(device)
    copy = triton_copy.copy

    def reversed_copy(caches, blocks, *rest, **options):
        copy(caches, blocks.flip(0), *rest, **options)

    monkeypatch.setattr(triton_copy, "copy", reversed_copy)
    with pytest.raises(KernelMismatch, match="KV"):
        check_kv_pack(device)
