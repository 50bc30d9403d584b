"""Tables of step times of devices: from data sheets by rooflines, or from files of measurements; and their sweep.

`devices` makes tables from data sheets, `read_device` reads the table of a measured device (JSON, with the names of
`DeviceTable`), and `known_devices` returns both: the files are in the folder `measured`, which is empty so far;
`python -m bench.gpu.device_table` writes them. A measured table replaces the data sheet of the same name. The
estimator knows none of this; it sees the times of simulated steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.generation.engine.step_sizes import graph_sizes, row_capacity
from services.step_time.sweep import SWEEP_SECONDS, MeasuredStep, swept_batches

Floats = NDArray[np.float64]
# Sizes that vLLM itself captures on an H100 for 256 samples or more; an instance adds sizes of verifying steps.
_VLLM_GRAPHS = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
# Default samples and draft window of an instance, and most tokens of a step.
_SAMPLES, _WINDOW, _LARGEST = 256, 16, 16384
DATA_SHEET = "data sheet"
"""Source of tables that are made from data sheets."""
NOISE = 0.03
"""Standard deviation of measured step times, as a share."""
MEASURED = Path(__file__).parent / "measured"
# Sharpness of the knee between two limits of a roofline.
_KNEE = 3.0


@dataclass(frozen=True, slots=True)
class DeviceTable:
    """Step times of a model on a device: milliseconds by verified tokens (rows), and what samples and context add.

    Rows are listed at the sizes for which graphs are captured and at larger ones.
    """

    name: str
    kv_tokens: int
    """Tokens of context that fit in the KV cache, of all samples together."""
    rows: Floats
    milliseconds: Floats
    """Time of a step with `rows` rows.

    With graphs, a number of rows between two entries takes as long as the larger one. Beyond the last entry each
    row adds as much as between the last two.
    """
    per_sample: float = 0.0
    """Milliseconds of the host and the sampler for each sample."""
    per_context: float = 0.0
    """Milliseconds to read a token of context."""
    attended: float = 0.0
    """Milliseconds for each pair of a row and an earlier token; overlaps with reading the context."""
    attending: float = 0.0
    """Milliseconds for each pair of a draft token and an earlier token; overlaps with nothing."""
    graphs: tuple[int, ...] = ()
    """Numbers of rows for which graphs are captured. Without graphs, times are interpolated between `rows`."""
    most_rows: int = _LARGEST
    """Most verified tokens of a step."""
    slowed: DeviceTable | None = None
    """Table that replaces this one in mid-run."""
    source: str = DATA_SHEET
    """Origin of the times."""
    host: float = 0.0
    """Milliseconds of the host between two steps in which the device waits."""
    verifying: float = 1.0
    """Factor of the time of steps that verify drafts, host included."""

    def seconds(self, samples: int, rows: int, context: float, *, verifies: bool | None = None) -> float:
        """Return the time of a step. By default a step with more rows than samples verifies drafts."""
        beyond = rows - float(self.rows[-1])
        if beyond > 0:
            found = float(self.milliseconds[-1]) + beyond * self._last_slope()
        elif self.graphs:
            found = float(self.milliseconds[int(np.searchsorted(self.rows, rows))])
        else:
            found = float(np.interp(rows, self.rows, self.milliseconds))
        reading = self.per_context * context
        found += _either(reading, self.attended * rows * context / samples)
        found += self.attending * context * (rows / samples - 1)
        found += self.per_sample * samples + self.host
        if rows > samples if verifies is None else verifies:
            found *= self.verifying
        return found / 1e3

    def _last_slope(self) -> float:
        """Return the milliseconds of a row beyond the listed ones."""
        if len(self.rows) < 2:
            return 0.0
        return float((self.milliseconds[-1] - self.milliseconds[-2]) / (self.rows[-1] - self.rows[-2]))


def _either(*limits: float) -> float:
    return float(sum(each**_KNEE for each in limits) ** (1 / _KNEE))


@dataclass(frozen=True, slots=True)
class Chip:
    """Achieved operations and bytes per second, bytes of memory, and clock relative to the data sheet."""

    compute: float
    bandwidth: float
    memory: float
    clock: float = 1.0


H100 = Chip(0.65 * 989e12, 0.8 * 3.35e12, 80e9)
B200 = Chip(0.6 * 2250e12, 0.8 * 8e12, 180e9)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model: weights read by every step and operations of a row, layers, heads."""

    weights: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    experts: float = 0.0
    """Parameters of the routed experts of all layers."""
    head_dim: int = 128
    vocabulary: int = 151_936

    @property
    def kv_bytes(self) -> float:
        return 4.0 * self.layers * self.kv_heads * self.head_dim


QWEN3_8B = ModelSizes(7.57e9, 36, 4096, 32, 8)
LLAMA_70B = ModelSizes(69.5e9, 80, 8192, 64, 8, vocabulary=128_256)
QWEN3_30B_A3B = ModelSizes(1.2e9, 48, 2048, 32, 4, experts=29.0e9)
EAGLE3_8B = ModelSizes(0.40e9, 1, 4096, 32, 8)
"""One layer of the model, the projection of its features, and an output of 32,000 tokens."""
EAGLE3_70B = ModelSizes(1.33e9, 1, 8192, 64, 8)
_ROUTED, _EXPERTS = 8, 128
_GROUPED_BANDWIDTH, _GROUPED_COMPUTE = 0.75, 0.55
_KERNELS, _LAUNCH, _GRAPH_BASE = 12, 7e-6, 9e-4
_ALL_REDUCE, _LINK = 12e-6, 225e9


def decoding_table(
    name: str, model: ModelSizes, chip: Chip, devices: int = 1, weight_bytes: float = 2.0
) -> DeviceTable:
    """Return the table of a model on `devices` chips that share it, with `weight_bytes` for each dense parameter.

    Made by rooflines from data sheets, and checked against published decoding speeds:

    - H100 SXM: 989 TFLOP/s dense bfloat16, 3.35 TB/s, 80 GB (NVIDIA H100 data sheet). Kernels reach 0.65 and 0.8 of
      that. A decoding step of 8B then takes 6.7 ms; vLLM's published single-stream speeds are 130 to 150 tokens/s.
    - B200: 2.25 PFLOP/s dense bfloat16, 8 TB/s, 180 GB (NVIDIA DGX B200 data sheet), 0.6 and 0.8 of it reached.
    - 8B: Qwen3-8B, 70B: Llama-3.1-70B, MoE: Qwen3-30B-A3B, each by the sizes in its config.json, in bfloat16.
    - TP=8: two all-reduces a layer, each 12 us and 225 GB/s over NVLink (nccl-tests all_reduce_perf, 8 x H100).
    - Mixture of experts: a step reads the experts that its rows are routed to, 128 (1 - (1 - 8/128)^rows) of 128 in
      each layer for routing without preference; the grouped kernels reach 0.6 of the bandwidth and 0.35 of the
      compute.
    - Graphs are those that an instance with 256 samples and drafts of 16 tokens captures, by the engine's own
    function.
      Beyond the largest a step takes at least as long as its launches: 7 us a kernel (vLLM, eager).
    - CPU: the tinymath model in float32, from the sweep of the machine of docs/performance.md; verification costs
    there
      by row and by the context that rows attend to.

    A device that halves its clock does everything except reading memory in twice the time.
    """
    most_rows = row_capacity(_LARGEST, model.vocabulary)
    graphs = graph_sizes(_VLLM_GRAPHS, _SAMPLES, _WINDOW, most_rows)
    beyond = np.unique(np.geomspace(graphs[-1] + 64, _LARGEST, 160).astype(int) // 64 * 64)
    rows = np.array([*graphs, *beyond[beyond > graphs[-1]]], np.float64)
    compute, slow = chip.compute * devices * chip.clock, 1 / chip.clock
    dense = (
        (weight_bytes * model.weights / (chip.bandwidth * devices)) ** _KNEE
        + (2 * model.weights * rows / compute) ** _KNEE
    ) ** (1 / _KNEE)
    awake = 1 - (1 - _ROUTED / _EXPERTS) ** rows
    reading = 2 * model.experts * awake / (_GROUPED_BANDWIDTH * chip.bandwidth)
    routing = 2 * model.experts * _ROUTED / _EXPERTS * rows / (_GROUPED_COMPUTE * compute)
    experts = (reading**_KNEE + routing**_KNEE) ** (1 / _KNEE)
    links = 0.0 * rows
    if devices > 1:
        links = 2 * model.layers * (_ALL_REDUCE * slow + 2 * model.hidden * rows / _LINK)
    seconds = dense + experts + links + _GRAPH_BASE * slow
    eager = model.layers * _KERNELS * _LAUNCH * slow
    seconds = np.where(rows > graphs[-1], np.maximum(seconds, eager), seconds)
    held = 2 * (model.weights + model.experts)
    return DeviceTable(
        name,
        int((0.9 * chip.memory * devices - held) / model.kv_bytes),
        rows,
        np.maximum.accumulate(1e3 * seconds),
        per_sample=0.004 * slow,
        per_context=1e3 * model.kv_bytes / (chip.bandwidth * devices),
        graphs=graphs,
        most_rows=most_rows,
        attended=1e3 * 4 * model.layers * model.heads * model.head_dim / (0.5 * compute),
    )


def _cpu() -> DeviceTable:
    rows = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, _LARGEST], np.float64)
    # Milliseconds: the step, and each row's products and passes through Python.
    return DeviceTable(
        "CPU tinymath", 1 << 20, rows, 2.4 + 0.0195 * rows, per_sample=0.042, per_context=8e-5, attending=7e-5
    )


def devices() -> Sequence[DeviceTable]:
    """Return the tables that are made from data sheets."""
    h100 = decoding_table("8B H100", QWEN3_8B, H100)
    halved = decoding_table("8B H100", QWEN3_8B, replace(H100, clock=0.5))
    return (
        _cpu(),
        h100,
        decoding_table("70B 8xH100", LLAMA_70B, H100, devices=8),
        decoding_table("30B-A3B H100", QWEN3_30B_A3B, H100),
        decoding_table("8B B200", QWEN3_8B, B200),
        replace(h100, name="8B H100, clock halved", slowed=halved),
    )


Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class DeviceFile(BaseModel):
    """Measured table in a file; `DeviceTable` describes the fields."""

    model_config = ConfigDict(extra="forbid")

    name: str = "measured"
    source: str = "measured"
    kv_tokens: Annotated[int, Field(ge=1)]
    rows: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    milliseconds: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]]
    per_sample: Milliseconds = 0.0
    per_context: Milliseconds = 0.0
    attended: Milliseconds = 0.0
    attending: Milliseconds = 0.0
    graphs: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    most_rows: Annotated[int, Field(ge=1)] = 16384

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if len(self.rows) != len(self.milliseconds):
            raise ValueError(f"{len(self.rows)} rows have {len(self.milliseconds)} milliseconds")
        for name in ("rows", "graphs"):
            if any(b <= a for a, b in pairwise(getattr(self, name))):
                raise ValueError(f"{name} must ascend")
        if any(b < a for a, b in pairwise(self.milliseconds)):
            raise ValueError("milliseconds must not fall as rows rise")
        return self


def read_device(path: Path) -> DeviceTable:
    """Return the table of a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the content is no table; the message names the field.
    """
    found = DeviceFile.model_validate_json(path.read_bytes())
    rows, milliseconds = np.array(found.rows, np.float64), np.array(found.milliseconds, np.float64)
    added = found.model_dump(include={"per_sample", "per_context", "attended", "attending", "most_rows"})
    return DeviceTable(
        found.name,
        found.kv_tokens,
        rows,
        milliseconds,
        graphs=tuple(found.graphs),
        source=found.source,
        **added,
    )


def known_devices(measured: Path = MEASURED) -> Sequence[DeviceTable]:
    """Return the tables from data sheets, and the measured tables in the files of a folder.

    A measured table takes the place of the data sheet with its name.

    Raises:
        ValueError: one of the files is no table, or two of them have the same name.
    """
    found: dict[str, DeviceTable] = {}
    for path in sorted(measured.glob("*.json")):
        table = read_device(path)
        if table.name in found:
            raise ValueError(
                f"{path}: another file in {measured} is named {table.name!r}, too; rename one of them"
            )
        found[table.name] = table
    sheets = [found.pop(each.name, each) for each in devices()]
    return (*sheets, *found.values())


def swept(
    device: DeviceTable, max_samples: int, seed: int = 0, *, noise: float = NOISE
) -> list[MeasuredStep]:
    """Return the steps that a sweep of the device measures in its time, with relative noise `noise`."""
    random, found, left = Random(seed), list[MeasuredStep](), SWEEP_SECONDS
    for batch in swept_batches(max_samples, device.most_rows, 1 << 16, device.graphs):
        for rows in batch.rows:
            if left <= 0:
                return found
            context = batch.samples * batch.prompt
            seconds = device.seconds(batch.samples, rows, context)
            left -= 2 * seconds
            measured = seconds * random.lognormvariate(0, noise)
            found.append(MeasuredStep(samples=batch.samples, rows=rows, context=context, seconds=measured))
    return found
