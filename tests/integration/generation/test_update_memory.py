"""Memory of an instance while new weights are read and applied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.integration.generation.conftest import Policy
from tests.support.instances import InstanceProcess, stub_of
from tests.support.models import tiny_model
from tests.support.peak_memory import PeakMemory

HANDLES = range(1, 5)
UPDATES = 2
MARGIN = 48 << 20
"""Bytes of buffers and activations. What an instance has of its own moves by 25 MB from one reading to the next."""


def dirty_bytes(pid: int) -> int:
    """Return the private memory of a process without unchanged pages of files; 0 once it has ended.

    Unchanged pages of libraries count as private while no other process on the machine maps them.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty:"))


async def test_an_update_takes_one_model_more_and_gives_it_back(
    start: Callable[..., InstanceProcess], tmp_path: Path
) -> None:
    model = tiny_model(
        tmp_path / "model",
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=4096,
        max_position_embeddings=512,
    )
    size = (model / "model.safetensors").stat().st_size
    assert size > 4 * MARGIN
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
