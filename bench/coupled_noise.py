"""Cost of coupled noise on this machine: `python -m bench.coupled_noise`.

Prints nanoseconds per row and vocabulary entry of the fast sampler and of a naive compiled one (scalar Philox
and two library logarithms for every entry), for kinds of logits that prune differently; then the share of a
decoding step that the noise of 64 requests takes. Minimum over repetitions; arrays are made beforehand.
"""

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from kernels.coupled_sampler.cpu import coupled_argmax, coupled_verify, warm_up

VOCABULARIES = (128, 512, 32_000, 151_936)
ROWS = (64, 1088)
KINDS = ("flat", "spread", "peaked", "top-p")
REQUESTS = 64
STEP_VOCABULARY = 512


@dataclass(frozen=True, slots=True)
class NoiseBatch:
    """Rows to sample: logits [N, V], the rest [N]."""

    logits: NDArray[np.float32]
    seeds: NDArray[np.uint64]
    positions: NDArray[np.int64]
    temperature: NDArray[np.float32]

    def first(self, rows: int) -> "NoiseBatch":
        """Return the batch cut to its first rows."""
        return NoiseBatch(
            self.logits[:rows], self.seeds[:rows], self.positions[:rows], self.temperature[:rows]
        )

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As the samplers take them."""
        return self.logits, self.seeds, self.positions, self.temperature


def make_batch(kind: str, rows: int, vocabulary: int) -> NoiseBatch:
    """Make logits of a kind: nearly equal; normal, sigma 3; so with one far ahead; so with all but 20 masked."""
    rng = np.random.default_rng(vocabulary)
    logits = rng.standard_normal((rows, vocabulary), dtype=np.float32)
    logits *= np.float32(0.3 if kind == "flat" else 3.0)
    if kind == "peaked":
        logits[np.arange(rows), rng.integers(0, vocabulary, rows)] += 25.0
    elif kind == "top-p":
        kept = np.partition(logits, -20, axis=1)[:, -20:-19]
        logits[logits < kept] = -np.inf
    seeds = rng.integers(0, 2**64, rows, dtype=np.uint64)
    return NoiseBatch(logits, seeds, rng.integers(0, 8192, rows), np.ones(rows, dtype=np.float32))


def seconds(call: Callable[[], Any], budget: float) -> float:
    """Return the shortest time of one call, repeated for `budget` seconds and three times at least."""
    shortest, spent, repetitions = math.inf, 0.0, 0
    while spent < budget or repetitions < 3:
        start = time.perf_counter()
        call()
        elapsed = time.perf_counter() - start
        shortest, spent, repetitions = min(shortest, elapsed), spent + elapsed, repetitions + 1
    return shortest


@numba.njit(nogil=True, error_model="numpy")
def naive_argmax(logits, seeds, positions, temperature):  # type: ignore[no-untyped-def]
    """Sample by the obvious compiled loop: a block, two logarithms and a comparison for each entry."""
    low, word = np.uint64(0xFFFFFFFF), np.uint64(32)
    tokens = np.empty(len(logits), dtype=np.int64)
    for n in range(len(logits)):
        best, token = -np.inf, -1
        for v in range(logits.shape[1]):
            c0, c1, c2, c3 = np.uint64(v // 4), np.uint64(positions[n]), np.uint64(1), np.uint64(0)
            k0, k1 = seeds[n] & low, seeds[n] >> word
            for _ in range(10):
                p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
                c0, c1, c2, c3 = (p1 >> word) ^ c1 ^ k0, p1 & low, (p0 >> word) ^ c3 ^ k1, p0 & low
                k0 = (k0 + np.uint64(0x9E3779B9)) & low
                k1 = (k1 + np.uint64(0xBB67AE85)) & low
            lane = v % 4
            bits = c0 if lane == 0 else c1 if lane == 1 else c2 if lane == 2 else c3
            score = logits[n, v] / temperature[n] - math.log(-math.log((bits + 0.5) * 2.0**-32))
            if score > best:
                best, token = score, v
        tokens[n] = token
    return tokens


def print_costs(budget: float, largest_bytes: int) -> None:
    """Print the table of costs per entry."""
    print(
        f"{'vocabulary':>10} {'rows':>5} {'logits':>7} {'naive ns':>9} {'fast ns':>8} {'fast ms':>8} "
        f"{'times':>6}"
    )
    for vocabulary in VOCABULARIES:
        for rows in ROWS:
            if rows * vocabulary * 4 > largest_bytes:
                print(f"{vocabulary:>10} {rows:>5}  left out: its logits exceed --largest-mib")
                continue
            for kind in KINDS:
                print_cost(make_batch(kind, rows, vocabulary), kind, budget)


def print_cost(batch: NoiseBatch, kind: str, budget: float) -> None:
    """Print one line: naive on a few rows (its cost is the same for each), fast on all."""
    rows, vocabulary = batch.logits.shape
    few = batch.first(max(1, min(rows, 400_000 // vocabulary)))
    naive = seconds(lambda: naive_argmax(*few.arguments), 0.0) / few.logits.size
    total = seconds(lambda: coupled_argmax(*batch.arguments), budget)
    fast = total / batch.logits.size
    print(
        f"{vocabulary:>10} {rows:>5} {kind:>7} {naive * 1e9:>9.2f} {fast * 1e9:>8.3f} {total * 1e3:>8.3f} "
        f"{naive / fast:>6.0f}"
    )


def print_step_shares(step_seconds: float, budget: float) -> None:
    """Share of a step: plain decoding, and 16 drafts a request, all accepted and all wrong."""
    print(f"\n{REQUESTS} requests, {STEP_VOCABULARY} entries, share of a step of {step_seconds * 1e3:g} ms")
    for kind in KINDS:
        for drafts in (0, 16):
            for true in (True, False) if drafts else (True,):
                elapsed = step_cost(kind, drafts, true, budget)
                label = "no drafts" if not drafts else f"{drafts} {'true' if true else 'wrong'} drafts"
                print(f"{kind:>7}  {label:<16} {elapsed * 1e3:6.3f} ms  {elapsed / step_seconds:6.1%}")


def step_cost(kind: str, drafts: int, true: bool, budget: float) -> float:
    """Return the seconds that sampling and verification of one step take."""
    rows = drafts + 1
    batch = make_batch(kind, REQUESTS * rows, STEP_VOCABULARY)
    cu_rows = np.arange(REQUESTS + 1, dtype=np.int64) * rows
    seeds, positions = batch.seeds[:REQUESTS], batch.positions[:REQUESTS]
    every = np.repeat(positions, rows) + np.tile(np.arange(rows), REQUESTS)
    tokens = coupled_argmax(batch.logits, np.repeat(seeds, rows), every, batch.temperature)
    guesses = tokens if true else (tokens + 1) % STEP_VOCABULARY
    draft_ids = guesses.reshape(REQUESTS, rows)[:, :drafts].reshape(-1)
    arguments = (batch.logits, seeds, positions, batch.temperature[:REQUESTS], draft_ids, cu_rows)
    return seconds(lambda: coupled_verify(*arguments), budget)


def main() -> None:
    """Parse flags and print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--step-ms", type=float, default=5.0, help="the step to compare with")
    parser.add_argument("--budget", type=float, default=0.1, help="seconds of repetition for each figure")
    parser.add_argument("--largest-mib", type=int, default=256, help="leave out larger logits")
    options = parser.parse_args()
    start = time.perf_counter()
    warm_up()
    print(f"warm-up (compile, or load from the cache): {time.perf_counter() - start:.2f} s\n")
    print_costs(options.budget, options.largest_mib << 20)
    print_step_shares(options.step_ms / 1e3, options.budget)


if __name__ == "__main__":
    main()
