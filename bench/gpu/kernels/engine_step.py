"""Run the kernels of an engine's step around its model, without vLLM; a large product stands for the model.

A step has one packed copy to the device, segments written into the table of guesses, drafts read from it, the
product, sampling and verification, and one packed copy back. It must pick the specification's tokens, be capturable
in a CUDA graph as a whole, and never make the host wait for the device. Then the time is measured that the kernels
add to a product of about 7 ms, the step of a model of 8 billion parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.gpu.kernels import cases
from bench.gpu.kernels.exact import captured
from bench.gpu.kernels.measure import launching
from kernels.backend import KernelMismatch
from kernels.coupled_sampler.noise import Domain, gumbel
from kernels.coupled_sampler.reference import verify
from kernels.coupled_sampler.sample import outputs_layout, sample
from kernels.draft_table import DraftTable, Segments
from kernels.transfer import layout_of, views

WITHOUT_DEVICE = "there is no CUDA device: it ran without a graph, by the interpreter, and nothing was timed"
Array = NDArray[Any]
_STEP_SECONDS = 7e-3
_SEED = 0x0123456789ABCDEF
_TURNS = 3
_TIMED = 30


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Samples of a step, draft tokens of each, and positions of the table's rows."""

    samples: int
    drafts: int
    length: int

    @classmethod
    def of(cls, sizes: cases.Sizes) -> StepSizes:
        """Return the step sizes for settings; as many samples decode as rows are sampled otherwise."""
        return cls(max(2, sizes.rows // (sizes.drafts + 1)), sizes.drafts, max(sizes.long, 4 * sizes.drafts))

    @property
    def rows(self) -> int:
        """Rows of logits."""
        return self.samples * (self.drafts + 1)


class EngineStep:
    """One step whose inputs are written into fixed memory, so that a graph can replay `run`."""

    def __init__(self, device: torch.device, sizes: cases.Sizes, product: Callable[[], object]) -> None:
        """Create random logits and empty rows of guesses. `product` stands for the model."""
        self.sizes = StepSizes.of(sizes)
        self._device, self._product = device, product
        n, rows = self.sizes.samples, self.sizes.rows
        self.logits = torch.randn(
            rows, sizes.vocabulary, generator=torch.Generator().manual_seed(0)
        )  # On the host first: every device has the same.
        self._there = self.logits.to(device)
        self._table = DraftTable(n, self.sizes.length, device)
        # Write two more drafts than a step verifies, so that the table has more entries than are read.
        segments = n * (self.sizes.drafts + 2)
        names = ("seeds", "positions", "behind", "slots", "starts", "counts")
        integers = {name: (n, torch.int64) for name in names}
        self._layout, size = layout_of(
            **integers,
            temperature=(n, torch.float32),
            first_rows=(n + 1, torch.int64),
            owners=(rows, torch.int64),
            plain=(rows, torch.int64),
            tokens=(segments, torch.int32),
        )
        pinned = device.type == "cuda"
        self._up = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._inputs = torch.empty(size, dtype=torch.uint8, device=device)
        self._outputs, out_size = outputs_layout(rows, n)
        self._results = torch.empty(out_size, dtype=torch.uint8, device=device)
        self._down = torch.empty(out_size, dtype=torch.uint8, pin_memory=pinned)

    def prepare(self, positions: Array, guesses: Array) -> None:
        """Write the inputs of the next run in host memory: response positions [n], and guesses [n, drafts + 2]."""
        n, each = self.sizes.samples, self.sizes.drafts + 1
        there = views(self._up, self._layout)
        rows = torch.arange(n * each)
        for name, vector in {
            "seeds": torch.arange(n) + _SEED,
            "positions": torch.from_numpy(positions),
            "behind": torch.from_numpy(positions),
            "slots": torch.arange(n).flip(0),
            "starts": torch.from_numpy(positions).flip(0),
            "counts": torch.full((n,), each + 1),
            "temperature": torch.ones(n),
            "first_rows": torch.arange(n + 1) * each,
            "owners": rows // each,
            "plain": rows,
            "tokens": torch.from_numpy(guesses[::-1].copy()).flatten(),
        }.items():
            there[name].copy_(vector)

    def run(self) -> None:
        """Run the step on the device, up to the copy of its results into host memory."""
        from kernels.coupled_sampler.triton_sample import LogitPart, sample_triton

        self._inputs.copy_(self._up, non_blocking=True)
        there = views(self._inputs, self._layout)
        self._table.write(Segments(**{name: there[name] for name in ("slots", "starts", "counts", "tokens")}))
        # Rows of the table are slots. The samples of the step have another order than the written rows.
        rows = torch.arange(self.sizes.samples, device=self._device)
        drafts = self._table.gather(rows, there["behind"], self.sizes.drafts)
        self._product()
        vectors = {**there, "drafts": drafts.flatten()}
        part = LogitPart(self._there, there["plain"], there["plain"])
        sample_triton(self._there, vectors, [part], views(self._results, self._outputs), Domain.TOKEN)
        self._down.copy_(self._results, non_blocking=True)

    def results(self) -> dict[str, Array]:
        """Wait for the device; return tokens [rows] and counts [n]."""
        wait(self._device)
        return {name: part.numpy() for name, part in views(self._down, self._outputs).items()}

    def expected(self, positions: Array) -> Array:
        """Return the specification's tokens of all rows, [n, drafts + 1]."""
        n, each = self.sizes.samples, self.sizes.drafts + 1
        logits = self.logits.numpy().reshape(n, each, -1)
        drawn = [
            [gumbel(_SEED + i, int(positions[i]) + j, logits.shape[2]) for j in range(each)] for i in range(n)
        ]
        found: Array = (logits + np.array(drawn)).argmax(axis=2)
        return found


def replayed(device: torch.device, sizes: cases.Sizes) -> dict[str, Any]:
    """Capture a step in a CUDA graph and replay it with other inputs; anything that waits raises an error.

    Drafts are right up to a position that differs between samples. KernelMismatch for any other token or count.
    """
    step = EngineStep(device, sizes, product(device, 1))
    n, k = step.sizes.samples, step.sizes.drafts
    accepted = 0
    replay: Callable[[], None] | None = None
    for turn in range(_TURNS):
        positions = (np.arange(n) * 3 + turn * 5) % (step.sizes.length - k - 2)
        truth = step.expected(positions)
        right = (np.arange(n) + turn) % (k + 1)
        guesses = np.pad(truth, ((0, 0), (0, 1))).astype(np.int32)
        wrong = np.arange(k + 2) >= right[:, None]
        guesses[wrong] = (guesses[wrong] + 1) % sizes.vocabulary
        step.prepare(positions, guesses)
        if replay is None:
            # This compiles, and fills the buffers that are kept for the device.
            step.run()
            wait(device)
            replay = captured(device, partial(_unwaited_run, device, step))
        with no_waiting(device):
            replay()
        _compare(step.results(), truth, guesses[:, :k], turn)
        accepted += int(right.sum())
    return {"replays": _TURNS, "accepted drafts": accepted, **_reason(device)}


def unwaited(device: torch.device, sizes: cases.Sizes) -> dict[str, Any]:
    """Call the entry functions as an engine does, without a graph: none may wait before the copy of the result."""
    step = StepSizes.of(sizes)
    logits = cases.logits_of(device, sizes, step.rows, 4.0)
    table = DraftTable(step.samples, step.length, device)
    ids, cu = torch.arange(step.samples), torch.arange(step.samples + 1) * (step.drafts + 1)
    slots, p = ids.to(device), torch.full((step.samples,), 0.95).to(device)

    def run() -> Any:
        table.write(Segments.of((slot, 0, range(step.drafts)) for slot in range(step.samples)))
        drafts = table.gather(slots, slots, step.drafts).flatten()
        ones = torch.ones(step.samples)
        return sample(logits, ids, slots, ones, drafts, cu, top_p=p, backend="triton")

    run()
    wait(device)
    with no_waiting(device):
        made = run()
    found = made.to_host()
    if not (found.counts.min() >= 1 and found.counts.max() <= step.drafts + 1):
        raise KernelMismatch(f"samples emitted {found.counts.tolist()} tokens of at most {step.drafts + 1}")
    return {"samples": step.samples, "drafts": step.drafts, **_reason(device)}


def beside_product(device: torch.device, sizes: cases.Sizes) -> dict[str, Any]:
    """Measure the time that the step's kernels add to a product of about 7 ms, in a graph and launched one by one.

    Launched one by one, the host is ahead of the device while launching takes less time than the product.
    """
    times = _products(device)
    alone, step = product(device, times), EngineStep(device, sizes, product(device, times))
    n = step.sizes.samples
    step.prepare(np.arange(n), np.zeros((n, step.sizes.drafts + 2), np.int32))
    step.run()
    alone()
    wait(device)
    if device.type != "cuda":
        return _reason(device)
    ways = {"product": alone, "graph": captured(device, step.run), "launched": step.run}
    found = {f"{name}_seconds": _each(device, run) for name, run in ways.items()}
    base = found["product_seconds"]
    shares = {f"{name}_share": found[f"{name}_seconds"] / base - 1 for name in ("graph", "launched")}
    return {**found, **shares, "host_seconds": launching(device, step.run), "rows": step.sizes.rows}


def product(device: torch.device, times: int) -> Callable[[], object]:
    """Return a run of `times` large products in bfloat16."""
    side = 4096 if device.type == "cuda" else 16
    a, b = torch.randn(2, side, side, device=device).bfloat16()
    out = torch.empty_like(a)

    def run() -> None:
        for _ in range(times):
            torch.mm(a, b, out=out)

    return run


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Raise an error in this context if anything makes the host wait for the device. No effect on a CPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def wait(device: torch.device) -> None:
    """Wait for a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _products(device: torch.device) -> int:
    """Return the number of products that take about as long as a model's step."""
    if device.type != "cuda":
        return 1
    return max(1, round(_STEP_SECONDS / _each(device, product(device, 1))))


def _each(device: torch.device, run: Callable[[], object]) -> float:
    """Return the mean seconds of a run, over many without a pause between them."""
    run()
    wait(device)
    begin = time.perf_counter()
    for _ in range(_TIMED):
        run()
    wait(device)
    return (time.perf_counter() - begin) / _TIMED


def _unwaited_run(device: torch.device, step: EngineStep) -> None:
    with no_waiting(device):
        step.run()


def _compare(found: dict[str, Array], truth: Array, drafts: Array, turn: int) -> None:
    n, each = truth.shape
    cu = np.arange(n + 1) * each
    counts = verify(truth.flatten(), drafts.flatten(), cu)
    if not np.array_equal(found["counts"], counts):
        raise KernelMismatch(
            f"replay {turn} emitted {found['counts'].tolist()} tokens, not {counts.tolist()}"
        )
    emitted = np.arange(each) < counts[:, None]
    tokens = found["tokens"].reshape(n, each)
    if not np.array_equal(tokens[emitted], truth[emitted]):
        wrong = int((tokens[emitted] != truth[emitted]).sum())
        raise KernelMismatch(f"replay {turn}: {wrong} of {int(emitted.sum())} tokens are wrong")


def _reason(device: torch.device) -> dict[str, Any]:
    return {} if device.type == "cuda" else {"not measured": WITHOUT_DEVICE}
