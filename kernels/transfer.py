"""Vectors of a step in one block of memory: one copy to the device before the step, one copy back after it.

A separate copy of each vector would cost the host some microseconds, and from memory that is not pinned it waits
for the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

_ALIGNED = 16
"""Alignment of vectors in bytes, whatever their lengths, so that no kernel is compiled for other alignments."""

Layout = dict[str, tuple[int, int, torch.dtype]]
"""By name: the first byte, the number of elements, and their type."""


def layout_of(**vectors: tuple[int, torch.dtype]) -> tuple[Layout, int]:
    """Return the layout of vectors of these lengths and types, and its size in bytes."""
    layout, end = {}, 0
    for name, (count, dtype) in vectors.items():
        layout[name] = (end, count, dtype)
        end += -(-count * dtype.itemsize // _ALIGNED) * _ALIGNED
    return layout, end


def views(memory: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    """Return the vectors in `memory`, uint8, as views."""
    # One slice for each vector: this runs several times a step, and a view costs the host a microsecond.
    whole = {dtype: memory.view(dtype) for dtype in {dtype for _, _, dtype in layout.values()}}
    found = {}
    for name, (begin, count, dtype) in layout.items():
        first = begin // dtype.itemsize
        found[name] = whole[dtype][first : first + count]
    return found


def uploaded(vectors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the vectors on `device`; the others are copied there together, without waiting for the copy."""
    away = {name: vector for name, vector in vectors.items() if vector.device != device}
    if not away:
        return dict(vectors)
    layout, size = layout_of(**{name: (len(vector), vector.dtype) for name, vector in away.items()})
    # torch caches pinned memory, and reuses it only after the copy out of it has ended.
    staged = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for name, part in views(staged, layout).items():
        part.copy_(away[name])
    return {**vectors, **views(staged.to(device, non_blocking=True), layout)}


def downloaded(memory: torch.Tensor) -> torch.Tensor:
    """Return `memory` in host memory; waits for the device."""
    if memory.device.type == "cpu":
        return memory
    there = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=memory.device.type == "cuda")
    there.copy_(memory, non_blocking=True)
    torch.cuda.current_stream(memory.device).synchronize()
    return there
