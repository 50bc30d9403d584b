"""TRL as a trainer has it: without vLLM, which would be imported with it and takes longer than all else."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest


def import_trl() -> Any:
    """Return the package `trl`; skips the test where it is not installed."""
    pytest.importorskip("datasets", reason="datasets is not installed (extra trl)")
    trl = pytest.importorskip("trl", reason="TRL is not installed (extra trl)")
    import_module("trl.import_utils").__dict__["is_vllm_available"] = lambda min_version=None: False
    return trl
