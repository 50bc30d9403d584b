"""Seeds of samples that are pre-generated without the noise of the step.

The seed is BLAKE2b with an 8-byte digest, read as a little-endian integer, over

    seed of the step's sample (8 bytes) | slot (8 bytes)

both little-endian, personalised with "paceline-bubble" so that it can be no seed of `services.platform.seeds`.
"""

import hashlib
import struct

_PERSON = b"paceline-bubble"


def uncoupled_seed(seed: int, slot: int) -> int:
    """A seed of its own for `slot`, derived from the 64-bit seed of one of the step's samples."""
    packed = struct.pack("<QQ", seed, slot)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=_PERSON).digest(), "little")
