"""A run of the suite on a processor that lacks what newer ones have: `--processor avx2`.

oneDNN, ATen, MKL, OpenBLAS, NumPy and Numba have settings that hide AVX-512, VNNI and AMX; `tests/support/startup`
hides them from vLLM. Processes that start afterwards do not see them: the workers of pytest-xdist.
"""

from __future__ import annotations

import os

from tests.support.stress import run_first

_SETTINGS = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "NUMBA_CPU_NAME": "haswell",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
}


def hide_newer_than_avx2() -> None:
    """Set the variables. Processes that have them may start others."""
    # Its names of features differ by version, and it warns of those that the processor lacks anyway.
    from numpy._core._multiarray_umath import __cpu_features__ as features

    newer = [name for name, there in features.items() if there and name.startswith(("AVX512", "X86_V4"))]
    os.environ |= _SETTINGS
    if newer:
        os.environ["NPY_DISABLE_CPU_FEATURES"] = " ".join(newer)
    run_first(SUITE_PROCESSOR="avx2")
