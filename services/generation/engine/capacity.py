"""Room that a step of vLLM's scheduler has for the tokens of prompts."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any


def prompt_rows(scheduler: Any, most: int) -> int:
    """Return the tokens of prompts that the next step can compute, `most` at most.

    vLLM schedules samples in the order of their arrival, then waiting ones for which it has a seat.
    """
    places = max(0, scheduler.max_num_running_reqs - len(scheduler.running))
    rows = 0
    for request in chain(scheduler.running, islice(scheduler.waiting, places)):
        # Every decoding sample needs one token anyway.
        rows += max(0, request.num_tokens - request.num_computed_tokens - 1)
        if rows >= most:
            return most
    return rows
