"""Random tensors of the kernels' tests: the same in every run."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> None:
    """Begin each test with the same random numbers, whatever ran before it."""
    torch.manual_seed(0)
