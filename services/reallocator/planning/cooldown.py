"""Hysteresis: an instance that gave samples takes none for a while, and the other way round. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from services.reallocator.planning.records import Rule, Transfer


class Cooldown:
    """Instances that gave or took samples in the last `decisions` decisions."""

    def __init__(self, decisions: int) -> None:
        self._decisions = decisions
        self._now = 0
        self._gave: dict[str, int] = {}
        self._took: dict[str, int] = {}

    def decided(self, transfers: Iterable[Transfer]) -> None:
        """Note the transfers of a decision. Evacuations do not count."""
        self._now += 1
        for transfer in transfers:
            if transfer.rule is not Rule.EVACUATE:
                self._gave[transfer.donor] = self._took[transfer.receiver] = self._now
        oldest = self._now - self._decisions
        self._gave = {name: at for name, at in self._gave.items() if at > oldest}
        self._took = {name: at for name, at in self._took.items() if at > oldest}

    def gives(self, instance_id: str) -> bool:
        """Return whether the instance may give samples."""
        return instance_id not in self._took

    def receives(self, instance_id: str) -> bool:
        """Return whether the instance may take samples."""
        return instance_id not in self._gave
