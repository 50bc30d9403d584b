"""SHA-256 in a thread beside the caller's: the digest is that of the bytes as they were given."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from paceline.weights.safetensors import OverlappedSha256

# Around the size above which a thread is used.
sizes = st.lists(st.integers(0, 200_000), max_size=8)


@given(sizes)
def test_the_digest_is_that_of_all_bytes_in_their_order(given_sizes: list[int]) -> None:
    digest, plain = OverlappedSha256(), hashlib.sha256()
    # Two buffers in turn, which are overwritten as soon as `update` has returned for the other one.
    buffers = [bytearray(200_000), bytearray(200_000)]
    for number, size in enumerate(given_sizes):
        buffer = buffers[number % 2]
        buffer[:size] = bytes([number % 256]) * size
        plain.update(memoryview(buffer)[:size])
        digest.update(memoryview(buffer)[:size])
    assert digest.hexdigest() == plain.hexdigest()


@given(sizes)
def test_settled_bytes_may_change(given_sizes: list[int]) -> None:
    digest, plain = OverlappedSha256(), hashlib.sha256()
    buffer = bytearray(200_000)
    for number, size in enumerate(given_sizes):
        buffer[:size] = bytes([number % 256]) * size
        plain.update(memoryview(buffer)[:size])
        digest.update(memoryview(buffer)[:size])
        digest.settle()
        buffer[:] = b"\xff" * len(buffer)
    assert digest.hexdigest() == plain.hexdigest()
