"""Options of `paceline up`, with their help and limits."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from services.local.config import DeviceChoice
from services.local.doctor import DEVICE_HELP


class DuringUpdate(StrEnum):
    """Use of instances while the trainer updates the policy, as the bubbles coordinator names it."""

    PREGENERATE = "pregenerate"
    HALT = "halt"
    SLEEP = "sleep"


Model = Annotated[
    str,
    typer.Option(
        help="Model folder in Hugging Face layout, organization/name on the hub, an address, or smollm2."
    ),
]
Instances = Annotated[int, typer.Option(min=1, help="Generation instances.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port of the gateway; 0 picks a free one.")]
HttpPort = Annotated[
    int | None, typer.Option(min=0, max=65535, help="Port of the HTTP facade. Default: there is none.")
]
ServedModelName = Annotated[
    str | None,
    typer.Option(
        help="Names of the model over HTTP, separated by commas; answers have the first. "
        "Default: its name on the hub, or its folder if it is given by that."
    ),
]
RedisUrl = Annotated[str | None, typer.Option(help="Redis to use. Default: start one.")]
Folder = Annotated[Path, typer.Option(help="Folder; logs go to logs/ in it.")]
Device = Annotated[DeviceChoice, typer.Option(help=DEVICE_HELP)]
Pin = Annotated[bool, typer.Option(help="On CPU, pin each instance to its share of the cores.")]
Restart = Annotated[bool, typer.Option(help="Restart instances that died.")]
Learner = Annotated[
    bool, typer.Option("--learner", help="Draft with an EAGLE-3 head that is trained online.")
]
DuringUpdateOption = Annotated[
    DuringUpdate,
    typer.Option(
        help="While the trainer updates: pregenerate the next step, halt, or sleep, which leaves it the GPUs."
    ),
]
NoToken = Annotated[
    bool,
    typer.Option(
        "--no-token",
        help="Require no token, for trainers over HTTP that send none: any user of this machine may call.",
    ),
]
LogBytes = Annotated[
    int, typer.Option(min=1 << 16, help="Size at which a log is rotated; three older files are kept.")
]
