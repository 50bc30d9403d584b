"""The fast CPU sampler: the tokens of reference.py, exactly, on one core.

    warm_up()                                                       # once, before serving: compiles or loads
    tokens, counts = coupled_verify(logits, seeds, positions, temperature, draft_ids, cu_rows)

Arrays are numpy or CPU torch tensors (shared, not copied, if contiguous); bfloat16 logits must be widened
by the caller. A cached compilation loads in well under a second; see jit.py for where the cache lies and what
NUMBA_CACHE_DIR does in a read-only container. The kernels release the GIL and start no threads.
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions carry numba types, which annotations cannot say.

from pathlib import Path
from typing import Any

import numpy as np
from numba import float32, int64, types, uint64, void
from numpy.typing import NDArray

from kernels.coupled_sampler.cpu_row import make_scratch, sample_row
from kernels.coupled_sampler.noise import Domain
from kernels.coupled_sampler.verify import UNSAMPLED, check_ragged
from kernels.jit import entry, source_fingerprint

_UNSAMPLED = np.int64(UNSAMPLED)
_NO_DRAFT = np.int64(-1)
_LOGITS = types.Array(float32, 2, "C", readonly=True)
_SEEDS = types.Array(uint64, 1, "C", readonly=True)
_INTEGERS = types.Array(int64, 1, "C", readonly=True)
_FLOATS = types.Array(float32, 1, "C", readonly=True)
_VERIFY_SIGNATURE = void(
    _LOGITS, _SEEDS, _INTEGERS, _FLOATS, _INTEGERS, _INTEGERS, uint64, int64[::1], int64[::1]
)


def coupled_argmax(
    logits: Any,
    seeds: Any,
    positions: Any,
    temperature: Any,
    out: NDArray[np.int64] | None = None,
    *,
    domain: Domain = Domain.TOKEN,
) -> NDArray[np.int64]:
    """argmax_v(logit_v / T + g(seed, position, v)) for each row; see coupled_argmax_reference for every rule.

    logits [N, V] float32; seeds [N] uint64 (int64 is read as two's complement); positions [N]; temperature
    [N]; `out` [N] int64 to write to. Returns [N] tokens, INVALID where a row cannot be sampled.
    """
    rows = len(seeds)
    no_drafts = np.empty(0, dtype=np.int64)
    each = np.arange(rows + 1, dtype=np.int64)
    tokens, _ = coupled_verify(logits, seeds, positions, temperature, no_drafts, each, out, domain=domain)
    return tokens


def coupled_verify(
    logits: Any,
    seeds: Any,
    positions: Any,
    temperature: Any,
    draft_ids: Any,
    cu_rows: Any,
    out: NDArray[np.int64] | None = None,
    *,
    domain: Domain = Domain.TOKEN,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sample the target's tokens and verify drafts, each request only up to its first mismatch.

    Request n of N has rows cu_rows[n] : cu_rows[n + 1] of logits [R, V] float32: one for each of its k >= 0
    drafts and one more (k = 0 is plain decoding). seeds [N], temperature [N]; positions [N] of its first row;
    draft_ids [R - N] one request after the other.

    Returns (tokens [R], counts [N]): request n emits tokens[cu_rows[n] : cu_rows[n] + counts[n]], its
    accepted drafts and the target's own next token. Rows behind that are UNSAMPLED and cost nothing. A row
    that cannot be sampled ends its request with INVALID as the last token emitted.

    TypeError for logits that are not float32, ValueError for shapes that do not fit.
    """
    logits = _check_logits(logits)
    cu_rows, positions, draft_ids = (_vector(a, np.int64) for a in (cu_rows, positions, draft_ids))
    seeds, temperature = _vector(seeds, np.uint64), _vector(temperature, np.float32)
    check_ragged(len(logits), len(draft_ids), cu_rows)
    requests = len(cu_rows) - 1
    if not len(seeds) == len(positions) == len(temperature) == requests:
        raise ValueError(
            f"{requests} requests, but {len(seeds)} seeds, {len(positions)} positions, "
            f"{len(temperature)} temperatures"
        )
    tokens = np.empty(len(logits), dtype=np.int64) if out is None else _check_out(out, len(logits))
    counts = np.empty(requests, dtype=np.int64)
    arrays = (logits, seeds, positions, temperature, draft_ids, cu_rows)
    _verify_rows(*(_readonly(a) for a in arrays), np.uint64(domain), tokens, counts)
    return tokens, counts


def warm_up() -> None:
    """Compile the sampler, or load it from the cache, so that the first step does not pay for it."""
    if not _verify_rows.signatures:
        _verify_rows.compile(_VERIFY_SIGNATURE)


@entry(source_fingerprint(Path(__file__).parent))
def _verify_rows(logits, seeds, positions, temperature, draft_ids, cu_rows, domain, tokens, counts):
    width = np.uint64(logits.shape[1])
    flat = logits.reshape(-1)
    maxima, keys, pairs, words, scores = make_scratch(logits.shape[1])
    for n in range(len(counts)):
        first, end = cu_rows[n], cu_rows[n + 1]
        row = first
        while True:
            start, position = np.uint64(row) * width, positions[n] + (row - first)
            # The drafts of request n start n entries before its rows: each earlier request has one fewer.
            draft = draft_ids[row - n] if row + 1 < end else _NO_DRAFT
            token = sample_row(
                flat, start, width, seeds[n], position, temperature[n], domain, draft,
                maxima, keys, pairs, words, scores,
            )  # fmt: skip
            tokens[row] = token
            row += 1
            if row == end or token < 0 or token != draft:
                break
        counts[n] = row - first
        tokens[row:end] = _UNSAMPLED


def _check_logits(logits: Any) -> NDArray[np.float32]:
    array = np.asarray(logits)
    if array.dtype != np.float32:
        raise TypeError(f"logits must be float32, got {array.dtype}")
    if array.ndim != 2 or array.shape[1] == 0:
        raise ValueError(f"logits must be [rows, vocabulary], got {list(array.shape)}")
    return np.ascontiguousarray(array)


def _check_out(out: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    if out.dtype != np.int64 or out.shape != (rows,) or not out.flags.c_contiguous:
        raise ValueError(f"out must be {rows} contiguous int64, got {list(out.shape)} {out.dtype}")
    return out


def _vector(values: Any, dtype: Any) -> NDArray[Any]:
    array = np.ascontiguousarray(values, dtype=dtype)
    if array.ndim != 1:
        raise ValueError(f"expected one dimension, got {list(array.shape)}")
    return array


def _readonly(array: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view, so that one compiled signature serves writable and read-only arrays."""
    view = array.view()
    view.flags.writeable = False
    return view
