"""SHA-256 in a thread of its own, while whoever gives it bytes goes on with them."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor

# Waking a thread takes about as long as hashing so many bytes.
_AT_ONCE = 64 << 10


class OverlappedSha256:
    """SHA-256 of bytes that are given one after the other, of which the last ones may still be read.

    One caller at a time. Its thread ends with it.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, "sha256")
        self._reading: Future[None] | None = None

    def update(self, data: memoryview | bytes) -> None:
        """Add bytes, which must not change before `settle` or the next `update` has returned."""
        self.settle()
        if len(data) < _AT_ONCE:
            self._digest.update(data)
        else:
            self._reading = self._thread.submit(self._digest.update, data)

    def settle(self) -> None:
        """Wait until the bytes given so far are not read any more."""
        if self._reading is not None:
            self._reading.result()
            self._reading = None

    def hexdigest(self) -> str:
        """Return the digest of the bytes given so far, in hexadecimal."""
        self.settle()
        return self._digest.hexdigest()
