"""Choice of the peer to fetch from: the nearest that works. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from services.platform.backoff import ExponentialBackoff

_PAUSE, _LONGEST_PAUSE = 0.25, 4.0


class PeerOrder:
    """Addresses, the best first. One that failed is left alone for a while. Times are in seconds, monotonic."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._rests = {address: ExponentialBackoff(_PAUSE, _LONGEST_PAUSE) for address in addresses}
        self._until: dict[str, float] = {}

    def choose(self, now: float) -> str | None:
        """Return the best address that is not left alone; None: wait."""
        return next((each for each in self._rests if self._until.get(each, now) <= now), None)

    def failed(self, address: str, now: float) -> None:
        """Leave an address alone, each time longer."""
        self._until[address] = now + self._rests[address].failed()

    def worked(self, address: str) -> None:
        """Forget the failures of an address that sent something."""
        self._rests[address].succeeded()

    def wait(self, now: float) -> float | None:
        """Return the seconds until an address may be tried again; None if there are none."""
        return min((max(0.0, until - now) for until in self._until.values()), default=None)
