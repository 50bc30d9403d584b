"""Receipt of a download, which lies in the model's folder once all of it is there."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from paceline.foreign_json import read_object
from services.contracts.durable_files import write_durably

NAME = ".paceline-model.json"


@dataclass(frozen=True, slots=True)
class Receipt:
    """Source of a model as it was given and as it was resolved, and the sizes of its files in bytes."""

    source: str
    resolved: str
    sizes: dict[str, int] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write it to the model's folder."""
        write_durably(folder / NAME, (json.dumps(asdict(self), indent=1) + "\n").encode())

    def holds(self, folder: Path) -> bool:
        """Return True if all files are in the folder, in their sizes."""
        try:
            return all((folder / path).stat().st_size == size for path, size in self.sizes.items())
        except OSError:
            return False


def read_receipt(folder: Path) -> Receipt | None:
    """Return the receipt in a folder; None if there is none that can be read."""
    try:
        return Receipt(**read_object(folder / NAME))
    except (OSError, ValueError, TypeError):
        return None
