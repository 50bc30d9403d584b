"""Kernels compile where no cache can be written, too."""

import logging

import numba

from kernels.coupled_sampler.jit import kernel


def increment(x):
    return x + 1


def test_kernel_is_compiled_without_a_cache_when_there_is_nowhere_to_write(monkeypatch, caplog):
    real = numba.njit

    def njit(**options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return real(**options)

    monkeypatch.setattr(numba, "njit", njit)
    with caplog.at_level(logging.WARNING):
        compiled = kernel(increment)
    assert compiled(1) == 2
    assert "NUMBA_CACHE_DIR" in caplog.text
