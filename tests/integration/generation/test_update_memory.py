"""Memory of an instance while new weights are read and applied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench.random_model import make_random_model
from bench.weights.memory import PeakMemory, dirty_bytes
from tests.integration.generation.conftest import Policy
from tests.support.instances import InstanceProcess, stub_of

HANDLES = range(1, 5)
UPDATES = 4
MARGIN = 32 << 20
"""Bytes of buffers and activations."""


async def test_an_update_takes_one_model_more_and_gives_it_back(
    start: Callable[..., InstanceProcess], tmp_path: Path
) -> None:
    model = make_random_model(tmp_path / "model", hidden=1024, layers=4, vocab_size=4096, length=512)
    size = (model / "model.safetensors").stat().st_size
    assert size > 6 * MARGIN
    with start(model, "large", adopted_weights=tmp_path / "adopted", sweep_seconds=0) as process:
        pid = process.running.pid
        async with stub_of(process.address) as stub:
            policy = Policy(process.address, stub)
            await policy.look()
            tokens = await policy.tokens(HANDLES)
            serving = dirty_bytes(pid)
            peaks, kept = [], []
            for _ in range(UPDATES):
                with PeakMemory({"instance": pid}, dirty_bytes) as memory:
                    await policy.update(model)
                peaks.append(memory.peak["instance"] - serving)
                assert await policy.tokens(HANDLES) == tokens
                kept.append(dirty_bytes(pid) - serving)
    assert max(peaks) < size + MARGIN, peaks
    assert max(kept) < MARGIN, kept
