"""Tables of step times in files, of devices that were measured. JSON, with the names of `DeviceTable`.

The files in `measured` are devices by name, beside those that are made from data sheets. There are none yet:
`python -m bench.gpu.device_table` makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.simulator.device_tables import DeviceTable, devices

MEASURED = Path(__file__).parent / "measured"
Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class DeviceFile(BaseModel):
    """Milliseconds of steps by verified tokens, and what samples and context add; see `DeviceTable`."""

    model_config = ConfigDict(extra="forbid")

    name: str = "measured"
    source: str = "measured"
    kv_tokens: Annotated[int, Field(ge=1)]
    rows: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    milliseconds: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]]
    per_sample: Milliseconds = 0.0
    per_context: Milliseconds = 0.0
    attended: Milliseconds = 0.0
    attending: Milliseconds = 0.0
    graphs: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    most_rows: Annotated[int, Field(ge=1)] = 16384

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if len(self.rows) != len(self.milliseconds):
            raise ValueError(f"{len(self.rows)} rows have {len(self.milliseconds)} milliseconds")
        for name in ("rows", "graphs"):
            if any(b <= a for a, b in pairwise(getattr(self, name))):
                raise ValueError(f"{name} must rise")
        if any(b < a for a, b in pairwise(self.milliseconds)):
            raise ValueError("milliseconds must not fall as rows rise")
        return self


def read_device(path: Path) -> DeviceTable:
    """Return the table of a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no table; the message names the field.
    """
    found = DeviceFile.model_validate_json(path.read_bytes())
    rows, milliseconds = np.array(found.rows, np.float64), np.array(found.milliseconds, np.float64)
    added = found.model_dump(include={"per_sample", "per_context", "attended", "attending", "most_rows"})
    return DeviceTable(
        found.name,
        found.kv_tokens,
        rows,
        milliseconds,
        graphs=tuple(found.graphs),
        source=found.source,
        **added,
    )


def known_devices(measured: Path = MEASURED) -> Sequence[DeviceTable]:
    """Return the tables from data sheets, and those in the files of a folder.

    Raises:
        ValueError: one of the files is no table.
    """
    return (*devices(), *(read_device(path) for path in sorted(measured.glob("*.json"))))
