"""Verification of drafts: a draft token is accepted iff it is the token that the target samples there."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

UNSAMPLED = -2
"""Token of a row behind a request's first mismatch, which nobody needed."""


def check_ragged(rows: int, drafts: int, cu_rows: NDArray[np.int64]) -> None:
    """ValueError unless `cu_rows` [N + 1] cuts the rows into N requests, of k >= 0 drafts and k + 1 rows."""
    if cu_rows.ndim != 1 or len(cu_rows) < 1 or cu_rows[0] != 0 or cu_rows[-1] != rows:
        raise ValueError(f"cu_rows must rise from 0 to the {rows} rows, got {_ends(cu_rows)}")
    if (np.diff(cu_rows) < 1).any():
        raise ValueError("every request needs at least one row")
    requests = len(cu_rows) - 1
    if drafts != rows - requests:
        raise ValueError(f"{requests} requests of {rows} rows take {rows - requests} drafts, got {drafts}")


def verify(tokens: Any, draft_ids: Any, cu_rows: Any) -> NDArray[np.int64]:
    """Return how many tokens each request emits: accepted drafts + 1.

    tokens [R] the target's token of every row; request n has rows cu_rows[n] : cu_rows[n + 1], row i of it
    follows its first i drafts; draft_ids [R - N] are the drafts of all requests, one after the other.
    A row without a token (negative) ends its request, as its last emitted token. Returns [N].
    """
    tokens, draft_ids, cu_rows = (np.asarray(a, dtype=np.int64) for a in (tokens, draft_ids, cu_rows))
    check_ragged(len(tokens), len(draft_ids), cu_rows)
    last = np.zeros(len(tokens), dtype=bool)
    last[cu_rows[1:] - 1] = True
    stop = last | (tokens < 0)
    stop[~last] |= tokens[~last] != draft_ids
    stops = np.flatnonzero(stop)
    first = stops[np.searchsorted(stops, cu_rows[:-1])]
    counts: NDArray[np.int64] = first - cu_rows[:-1] + 1
    return counts


def _ends(cu_rows: NDArray[np.int64]) -> str:
    return f"{cu_rows.flat[0]}..{cu_rows.flat[-1]}" if cu_rows.size else "nothing"
