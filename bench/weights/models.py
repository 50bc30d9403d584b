"""Make models of the weights benchmark, and measure a plain copy and one check of their files."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.random_model import make_random_model
from bench.worker import apart

VOCABULARY, LENGTH = 4096, 2048
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Model:
    """A model, and the median seconds of the operations that a push of its weights is compared with.

    `copy_seconds`: copying the files of a version to the same disk, synced. `check_seconds`: reading them once with
    SHA-256 and the test for finite values, in one thread.
    """

    megabytes: int
    folder: Path
    copy_seconds: float
    check_seconds: float


def shape_of(megabytes: int) -> tuple[int, int]:
    """Return width and layers of a model of about `megabytes` MB in float32."""
    hidden = 512 if megabytes < 200 else 1024
    embedding = VOCABULARY * hidden * 4
    layer = 12 * hidden * hidden * 4
    return hidden, max(1, round((megabytes * 1e6 - embedding) / layer))


def make_models(folder: Path, sizes: Sequence[int]) -> list[Model]:
    """Make a model of each size, and measure its copy and its check, in separate processes."""
    return [_made(folder, size) for size in sizes]


def _made(folder: Path, size: int) -> Model:
    place, (hidden, layers) = folder / f"model-{size}", shape_of(size)
    shape = {"hidden": hidden, "layers": layers, "vocab_size": VOCABULARY, "length": LENGTH}
    apart(partial(make_random_model, place, **shape))
    return Model(size, place, *apart(_measure, place, folder / "reference"))


def tensors_of(model: Path) -> dict[str, Any]:
    """Return copies of the tensors in the safetensors files of a folder."""
    from safetensors.torch import load_file

    return {
        name: tensor.clone()
        for path in sorted(model.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def _measure(model: Path, scratch: Path) -> tuple[float, float]:
    """Return the seconds of a copy and of a check under `scratch`, which is removed afterwards."""
    import torch

    from paceline.weights import safetensors
    from services.generation.weights.staging import read_manifest, stage

    torch.set_num_threads(1)
    source, target = scratch / "source", scratch / "target"
    source.mkdir(parents=True)
    safetensors.write(source, tensors_of(model))
    manifest, checksum = read_manifest(model), safetensors.checksum(source)

    def copy() -> None:
        target.mkdir()
        for path in source.iterdir():
            safetensors.sync(Path(shutil.copyfile(path, target / path.name)))

    copying = _median(copy, lambda: shutil.rmtree(target, ignore_errors=True))
    checking = _median(lambda: stage(source, 1, manifest, checksum))
    shutil.rmtree(scratch)
    return copying, checking


def _median(work: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
    took = []
    for _ in range(_ROUNDS):
        prepare()
        os.sync()
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return median(took)
