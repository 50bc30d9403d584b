"""Polls that are held back, in groups that have an answer or not together. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PollKind:
    """Part of a poll that decides, with the ledger, whether an instance that runs nothing gets an answer.

    `takes`: it has room, and no samples of a step or few enough. `told`: halt and sleep of its last answer.
    """

    policy_version: int
    takes: bool
    told: tuple[bool, bool]


class HeldPolls:
    """Instances whose polls are held back, by kind and in the order in which they came."""

    def __init__(self) -> None:
        self._kinds: dict[str, PollKind] = {}
        self._groups: dict[PollKind, dict[str, None]] = {}

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._kinds

    def hold(self, instance_id: str, kind: PollKind) -> None:
        """Hold the poll of an instance as the last of its kind; it may be held under another one so far."""
        self.leave(instance_id)
        self._kinds[instance_id] = kind
        self._groups.setdefault(kind, {})[instance_id] = None

    def leave(self, instance_id: str) -> None:
        """Hold an instance's poll no more, if it is held."""
        kind = self._kinds.pop(instance_id, None)
        if kind is not None:
            group = self._groups[kind]
            del group[instance_id]
            if not group:
                del self._groups[kind]

    def first(self, has_answer: Callable[[PollKind], bool]) -> list[str]:
        """Return the first of each kind that has an answer. The next one is up when that has taken its own."""
        return [next(iter(group)) for kind, group in self._groups.items() if has_answer(kind)]
