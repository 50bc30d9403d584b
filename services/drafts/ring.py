"""Which replica of the store a prompt lives on: rendezvous hashing. Pure.

Every replica gets a weight for the prompt from a hash of both; the highest wins. Replicas get equal shares,
and one that leaves or comes moves only the prompts that it had or gets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

_PERSON = b"paceline-drafts"


def owner(run_id: str, prompt_id: str, replicas: Iterable[str]) -> str | None:
    """The id of the replica that keeps the prompt; None when there are none. Order does not matter."""
    # The lengths keep ("a", "bc") and ("ab", "c") apart.
    run, prompt = run_id.encode(), prompt_id.encode()
    state = hashlib.blake2b(b"%d:%d:" % (len(run), len(prompt)), digest_size=8, person=_PERSON)
    state.update(run)
    state.update(prompt)
    return max(replicas, key=lambda replica: (_weight(state, replica), replica), default=None)


def _weight(prompt: hashlib.blake2b, replica: str) -> bytes:
    """8 bytes, uniformly distributed and independent for every pair; compared as a big-endian number."""
    state = prompt.copy()
    state.update(replica.encode())
    return state.digest()
