"""Make models of the weights benchmark, and measure a plain copy and one check of their files."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.random_model import make_random_model
from bench.worker import apart

VOCABULARY, LENGTH = 4096, 2048
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Reference:
    """Seconds of the operations that an update is compared with.

    `copy`: copying the files of a version to the same disk, synced. `check`: reading them once with SHA-256 and
    the test for finite values, in one thread. `memory_copy`: copying the tensors in memory, in one thread.
    """

    copy: float
    check: float
    memory_copy: float


def shape_of(megabytes: int) -> tuple[int, int]:
    """Return width and layers of a model of about `megabytes` MB in float32."""
    hidden = 512 if megabytes < 200 else 1024
    embedding = VOCABULARY * hidden * 4
    layer = 12 * hidden * hidden * 4
    return hidden, max(1, round((megabytes * 1e6 - embedding) / layer))


def make_models(folder: Path, sizes: list[int]) -> dict[int, Path]:
    """Make a model of each size, in a separate process."""
    found = {size: folder / f"model-{size}" for size in sizes}
    for size, place in found.items():
        hidden, layers = shape_of(size)
        shape = {"hidden": hidden, "layers": layers, "vocab_size": VOCABULARY, "length": LENGTH}
        apart(partial(make_random_model, place, **shape))
    return found


def weight_bytes(folder: Path) -> int:
    """Return the bytes of a folder's safetensors files and their index."""
    return sum(path.stat().st_size for path in folder.iterdir() if ".safetensors" in path.name)


def reference(model: Path, scratch: Path) -> Reference:
    """Measure the medians for the weights of a model, under `scratch`, which is empty afterwards."""
    return apart(_measure, model, scratch)


def _measure(model: Path, scratch: Path) -> Reference:
    import torch
    from safetensors.torch import load_file

    from paceline.weights import safetensors
    from services.generation.weights.staging import read_manifest, stage

    torch.set_num_threads(1)
    source, target = scratch / "source", scratch / "target"
    source.mkdir(parents=True)
    tensors = {
        name: tensor.clone()
        for path in sorted(model.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    safetensors.write(source, tensors)
    manifest, checksum = read_manifest(model), safetensors.checksum(source)

    def copy() -> None:
        target.mkdir()
        for path in source.iterdir():
            safetensors.sync(Path(shutil.copyfile(path, target / path.name)))

    copying = _median(copy, lambda: shutil.rmtree(target, ignore_errors=True))
    checking = _median(lambda: stage(source, 1, manifest, checksum))
    copies = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}

    def copy_in_memory() -> None:
        for name, tensor in tensors.items():
            copies[name].copy_(tensor)

    copy_in_memory()
    found = Reference(copying, checking, _median(copy_in_memory))
    shutil.rmtree(scratch)
    return found


def _median(work: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
    took = []
    for _ in range(_ROUNDS):
        prepare()
        os.sync()
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return statistics.median(took)
