"""Seeds of uncoupled pre-generation."""

from __future__ import annotations

import hashlib

from services.bubbles.pool import uncoupled_seed
from services.contracts.seeds import sample_seed


def test_known_answers_of_the_documented_hash() -> None:
    packed = (5).to_bytes(8, "little") + (3).to_bytes(8, "little")
    digest = hashlib.blake2b(packed, digest_size=8, person=b"paceline-bubble").digest()
    assert uncoupled_seed(5, 3) == int.from_bytes(digest, "little")
    assert uncoupled_seed(5, 3) == 5005006600828497256


def test_seeds_differ_from_the_steps_own_and_from_each_other() -> None:
    own = [sample_seed(7, 1, "p", slot) for slot in range(64)]
    derived = [uncoupled_seed(seed, slot) for slot, seed in enumerate(own)]
    assert len({*own, *derived}) == 128
