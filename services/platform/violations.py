"""What is wrong with one field of a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """One field at fault and why: `description` says the value found and what is allowed."""

    field: str
    description: str
