"""Names of prompts, which trainers do not name themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def prompt_id_of(token_ids: Sequence[int]) -> str:
    """Return the id of a prompt: a hash of its tokens, the same in every epoch and run."""
    return hashlib.blake2b(np.asarray(token_ids, dtype="<i8").tobytes(), digest_size=16).hexdigest()
