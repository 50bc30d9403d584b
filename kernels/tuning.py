"""Parameters of the kernels' launches, and the timer by which `make gpu` finds the fastest ones.

They change the time of a kernel but never a token: no sum that exactness depends on has an order. Every launch
looks up the parameters of its device, which are read from disk only once.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "tuned"
_WITHOUT_DEVICE = 2
"""Number of multiprocessors that launches in Triton's interpreter assume."""


class InvalidTuning(ValueError):
    """A file of tuned parameters has an unknown name or an impossible value."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Launch parameters. Blocks are in entries; `programs` is the number wanted on each multiprocessor.

    scan, search, loss: kernels that read the vocabulary. attention_across: positions that a program loads at once;
    attention_chunk: positions of the units that the queue shares out; attention_tile: most rows of a program.
    copy_piece: units of 8 bytes that a program copies. wide_products: one 64-bit product in Philox,
    split into halves, instead of two products.
    """

    scan_block: int = 1024
    scan_stages: int = 3
    scan_warps: int = 4
    scan_programs: int = 4
    wide_products: bool = True
    search_block: int = 1024
    search_warps: int = 4
    search_programs: int = 4
    attention_across: int = 32
    attention_chunk: int = 256
    attention_stages: int = 7
    attention_warps: int = 4
    attention_programs: int = 2
    attention_tile: int = 32
    loss_block: int = 2048
    loss_stages: int = 3
    loss_warps: int = 8
    copy_piece: int = 2048

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "bool":
                if not isinstance(value, bool):
                    raise InvalidTuning(f"{field.name} must be true or false, got {value!r}")
            elif type(value) is not int or not 1 <= value <= 1 << 16:
                raise InvalidTuning(f"{field.name} must be an integer in 1..65536, got {value!r}")
            elif not field.name.endswith(("programs", "stages")) and value & (value - 1):
                raise InvalidTuning(f"{field.name} must be a power of two, got {value}")


_forced: Tuning | None = None


def tuning(device: torch.device) -> Tuning:
    """Return the parameters for a device. InvalidTuning: its file cannot be used."""
    return _forced or _read_for(device_name(device))


@contextmanager
def using(forced: Tuning) -> Iterator[None]:
    """Launch with these parameters, in this process, until the context ends: for sweeps and tests."""
    global _forced
    before, _forced = _forced, forced
    try:
        yield
    finally:
        _forced = before


@cache
def device_name(device: torch.device) -> str:
    """Return the name of a device as its driver gives it; "cpu" for Triton's interpreter."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device."""
    if device.type != "cuda":
        return _WITHOUT_DEVICE
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def path_for(name: str, folder: Path = FOLDER) -> Path:
    """Return the path of the parameters of the device of this name."""
    return folder / (re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-") + ".json")


def write(path: Path, values: Tuning, about: dict[str, Any]) -> None:
    """Write parameters, and `about`: device and software of the measurement."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "values": asdict(values)}, indent=2) + "\n")


def read(path: Path) -> Tuning:
    """Return the parameters in a file of `write`. InvalidTuning: any other file."""
    try:
        values = json.loads(path.read_text())["values"]
        return Tuning(**values)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidTuning(f"{path}: {error}") from error


@cache
def _read_for(name: str) -> Tuning:
    path = path_for(name)
    return read(path) if path.exists() else Tuning()


Run = Callable[[], Any]
Timer = Callable[[Run], float]
_SOFTWARE = ("torch", "triton", "vllm", "flashinfer-python")


def timer(device: torch.device, milliseconds: int) -> Timer:
    """Return a timer of runs, in seconds: the median over about `milliseconds`, with an L2 flush before each.

    A run whose launches take the host longer than the device works takes as long as its launches. Without a CUDA
    device a run is timed once by the clock, which is no measurement.
    """
    if device.type != "cuda":
        return _once

    def timed(run: Run) -> float:
        from triton.testing import do_bench  # type: ignore[import-untyped]

        return float(do_bench(run, warmup=20, rep=milliseconds, return_mode="median")) / 1000

    return timed


def _once(run: Run) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def about(device: torch.device) -> dict[str, Any]:
    """Return the device's name, and the versions of the software; None if not installed."""
    return {"device": device_name(device), **{name: _version(name) for name in _SOFTWARE}}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
