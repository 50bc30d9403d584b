"""Translate enums: StrEnum members of the SDK and numbers of the protocol."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Generic, TypeVar

from paceline.convert.values import refuse

E = TypeVar("E", bound=StrEnum)


class EnumPair(Generic[E]):
    """The two sides of one enum."""

    def __init__(self, kind: type[E], wrapper: Any, prefix: str) -> None:
        pairs = {name.removeprefix(f"{prefix}_"): number for name, number in wrapper.items()}
        self._numbers = {member: pairs[member.name] for member in kind}
        self._members = {number: member for member, number in self._numbers.items()}
        self._unknown = kind.__members__.get("UNSPECIFIED")

    def number(self, member: E, field: str) -> Any:
        """Return the protocol's number of a member, or of its name. InvalidArgumentError: there is none."""
        found = self._numbers.get(member) if isinstance(member, str) else None
        if found is None:
            refuse(field, member, f"must be one of {', '.join(repr(each.value) for each in self._numbers)}")
        return found

    def member(self, number: int) -> E:
        """Return the member of a number; UNSPECIFIED for one that this SDK does not know."""
        member = self._members.get(number, self._unknown)
        assert member is not None, f"no member for {number}"
        return member
