"""Samples that have left their instance for another one to which there is no link yet. Pure.

An instance may move a sample to one that joined so lately that the gateway is still shaking hands with it. The
sample waits here for the link, and not for long: then it is resumed by its prefix like a lost one.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.links import Held


@dataclass(slots=True, eq=False)
class Traveller:
    """A sample under its new attempt, and the instance that has it as this migration; with none it is a sample that
    waits to be resumed there by its prefix."""

    held: Held
    receiver: str
    migration_id: str


class Transit:
    """Who waits, by the instance waited for."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[Traveller, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def wait(self, traveller: Traveller) -> None:
        """Notes one until `arrivals` or `leave`."""
        self._waiting.setdefault(traveller.receiver, {})[traveller] = None

    def arrivals(self, receiver: str) -> list[Traveller]:
        """Those that wait for an instance, in order; they wait no more."""
        return list(self._waiting.pop(receiver, ()))

    def leave(self, traveller: Traveller) -> bool:
        """One waits no more; False when it did not."""
        waiting = self._waiting.get(traveller.receiver, {})
        if traveller not in waiting:
            return False
        del waiting[traveller]
        if not waiting:
            del self._waiting[traveller.receiver]
        return True
