"""Flags of the demo; without torch, so that help and wrong flags are answered at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from examples.tinymath.options import MODEL, add_options
from services.contracts.modes import MODES
from services.local.config import DeviceChoice

_DESCRIPTION = """\
Demo of Paceline on this machine: instances, and a trainer of arithmetic.

    paceline demo                        # ten steps on two instances
    paceline demo --steps 3 --prompts 8 --out runs/small
    paceline demo --model smollm2        # a language model on problems in words

Writes `summary.json`, `steps.json`, logs, and the page of `paceline report`
with its entries (`report.html`, `report.jsonl`) to a folder under runs/;
runs/latest links to the latest one.
"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line; exit with status 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="paceline demo", description=_DESCRIPTION, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--instances", type=int, metavar="N", help="default: one for each GPU, or two without"
    )
    parser.add_argument("--device", choices=[each.value for each in DeviceChoice], default="auto")
    parser.add_argument(
        "--model",
        default=str(MODEL),
        help="model folder in Hugging Face layout, organization/name\n"
        "on the hub, or smollm2 (default: that of the example)",
    )
    parser.add_argument(
        "--dtype", default="float32", help="of the instances: float32, bfloat16 or auto\n(default: float32)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        default=Path("runs/demo"),
        help="folder for the results (default: runs/demo)",
    )
    parser.add_argument(
        "--policy", choices=tuple(MODES), help="how the platform speculates (default: planner)"
    )
    parser.add_argument(
        "--learner", action="store_true", help="draft with an EAGLE-3 head that learns during training"
    )
    parser.add_argument(
        "--instance-option",
        action="append",
        metavar="FLAG",
        default=[],
        help="more flags for instances, such as --max-num-seqs=64",
    )
    add_options(parser)
    given = parser.parse_args(arguments)
    if given.instances is not None and given.instances < 1:
        parser.error(f"argument --instances: is {given.instances}; must be at least 1")
    given.device = DeviceChoice(given.device)
    return given
