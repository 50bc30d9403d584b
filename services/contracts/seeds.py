"""Derive the seeds of samples: seed = H(run_seed, step, prompt_id, slot).

H is BLAKE2b with an 8-byte digest read as a little-endian integer, over

    run_seed (8 bytes) | step (8 bytes; omitted with coupled history) | slot (8 bytes) | prompt_id (UTF-8)

Integers are little-endian. Only the last field varies in length, so no two inputs have the same encoding. BLAKE2b's
personalisation separates the two modes ("paceline-fresh", "paceline-history"), so that no seed of one mode can
stand for one of the other. Known answers are in tests/unit/contracts/test_seeds.py; changing any of this changes
every sample.
"""

from __future__ import annotations

import hashlib
import struct

_MAX = (1 << 64) - 1
_FRESH = b"paceline-fresh"
_HISTORY = b"paceline-history"


def sample_seed(run_seed: int, step: int, prompt_id: str, slot: int, *, coupled_history: bool = False) -> int:
    """Return the 64-bit seed of one sample's noise.

    With `coupled_history` (exactness COUPLED_HISTORY) the step is omitted, so that a prompt gets the same noise
    again in later steps. ValueError if an integer is outside [0, 2**64).
    """
    for name, value in (("run_seed", run_seed), ("step", step), ("slot", slot)):
        if not 0 <= value <= _MAX:
            raise ValueError(f"{name} must be in [0, 2**64), got {value}")
    if coupled_history:
        person, fixed = _HISTORY, struct.pack("<QQ", run_seed, slot)
    else:
        person, fixed = _FRESH, struct.pack("<QQQ", run_seed, step, slot)
    digest = hashlib.blake2b(fixed + prompt_id.encode(), digest_size=8, person=person).digest()
    return int.from_bytes(digest, "little")
