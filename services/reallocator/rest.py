"""Hysteresis: who has just given takes nothing for a while, and the other way round. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from services.reallocator.records import Rule, Transfer


class Rest:
    """Keeps instances from giving what they have just taken, and the other way round. Counts decisions."""

    def __init__(self, decisions: int) -> None:
        self._decisions = decisions
        self._now = 0
        self._gave: dict[str, int] = {}
        self._took: dict[str, int] = {}

    def decided(self, transfers: Iterable[Transfer]) -> None:
        """A decision was made. Evacuation is not held against anybody."""
        self._now += 1
        for transfer in transfers:
            if transfer.rule is not Rule.EVACUATE:
                self._gave[transfer.donor] = self._took[transfer.receiver] = self._now
        oldest = self._now - self._decisions
        self._gave = {name: at for name, at in self._gave.items() if at > oldest}
        self._took = {name: at for name, at in self._took.items() if at > oldest}

    def gives(self, instance_id: str) -> bool:
        """Whether the instance may give."""
        return instance_id not in self._took

    def receives(self, instance_id: str) -> bool:
        """Whether the instance may take."""
        return instance_id not in self._gave
