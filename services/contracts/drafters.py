"""Registry of drafters: their names, and the class of each. No other place has a list of them.

A drafter of this repository is a line of `OWN`. A drafter of another package is an entry point of the group
`paceline.drafters`. Settings, knobs, metrics and the documentation take the names from here; only an instance that
uses a drafter imports its class.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any

GROUP = "paceline.drafters"
"""Group of the entry points of drafters of other packages."""
NAME = r"^[a-z][a-z0-9_]{0,31}$"
"""Names of drafters, which are labels of metrics."""


@dataclass(frozen=True, slots=True)
class RegisteredDrafter:
    """A drafter by name; `place` is its class, a `TokenDrafter`, as `module:class`."""

    name: str
    place: str
    own: bool = True
    """False for a drafter of another package."""
    by_default: bool = False
    """An instance uses it unless its setting `drafters` leaves it out."""
    model: bool = False
    """It has a model in the engine. The setting of its name switches it on, and `drafters` leaves it out."""

    def load(self) -> Any:
        """Import and return the class; what the import raises is passed on."""
        return resolve_name(self.place)


_HERE = "services.generation.drafters"
OWN = {
    each.name: each
    for each in (
        RegisteredDrafter("reference", f"{_HERE}.reference.drafter:ReferenceDrafter", by_default=True),
        RegisteredDrafter("suffix", f"{_HERE}.suffix:SuffixDrafter", by_default=True),
        RegisteredDrafter("eagle3", f"{_HERE}.draft_model:Eagle3Drafter", model=True),
        RegisteredDrafter("quantized", f"{_HERE}.draft_model:QuantizedDrafter", model=True),
    )
}
"""Drafters of this repository by name."""


def registered() -> dict[str, RegisteredDrafter]:
    """Return all drafters by name; an entry point cannot take the name of another drafter."""
    found = dict(OWN)
    for entry in sorted(entry_points(group=GROUP)):
        if re.match(NAME, entry.name):
            found.setdefault(entry.name, RegisteredDrafter(entry.name, entry.value, own=False))
    return found


def selectable() -> dict[str, RegisteredDrafter]:
    """Return the drafters that the setting `drafters` may name."""
    return {name: each for name, each in registered().items() if not each.model}
