"""Measure the seconds that new weights take from a trainer to its instances.

    make bench NAME=weights

Models of `--sizes` are made on the spot. A trainer in a separate process pushes them through a real gateway to
real instances, each with its own folder, by folder and by stream. In place of an engine each instance holds the
model and copies new weights into it.

Files are in `--folder`, by default in memory (/dev/shm) if there is room, so that Paceline is measured and not a
disk. The copy and the check that a push is compared with are measured in the same place, in the same run.
"""

from __future__ import annotations

import argparse
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.report import (
    BenchProgress,
    console,
    format_value,
    numbers,
    option_parser,
    say,
    show,
    show_table,
    write,
)
from bench.weights.fleet import FOLDER, STREAM, transfers
from bench.weights.models import make_models

LOGS = Path("runs/bench/weights")
GOALS = {"folder_vs_copy": 1.5, "stream_vs_copy": 1.5}
_IN_MEMORY = Path("/dev/shm")
_COLUMNS = (
    ("seconds", "seconds"),
    ("/ (copy + check)", "vs_copy_and_check"),
    ("copy s", "copy_seconds"),
    ("check s", "check_seconds"),
    ("stage s", "stage_seconds"),
    ("apply s", "apply_seconds"),
)


def main() -> None:
    """Measure the pushes, then show and write the figures."""
    warnings.simplefilter("ignore", SyntaxWarning)  # of packages that reasoning-gym imports
    given = arguments()
    progress, rows = BenchProgress(len(given.sizes) + 1, "weights"), list[dict[str, Any]]()
    with _place(given) as place:
        models = make_models(place, given.sizes)
        progress.advance("models")
        for model in models:
            for row in transfers(model, place / "platform", given.fleets, given.rounds):
                about = f"{row['transport']}, {row['megabytes']} MB, {row['instances']} instances"
                say(f"  {about}: {format_value(row['seconds'])} s")
                rows.append(row)
            progress.advance(f"{model.megabytes} MB")
    table = {f"{row['transport']}, {row['megabytes']} MB, {row['instances']}": row for row in rows}
    show_table("transfers", _COLUMNS, table)
    figures = summary(rows)
    show("weights", figures)
    options = {name: str(value) for name, value in vars(given).items()}
    write("weights", {**figures, "goals": GOALS, "transfers": rows, "options": options})


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the ratios to a copy and a check, of the largest model and one instance; None if not measured."""
    largest = max((row["megabytes"] for row in rows), default=0)
    found = {
        row["transport"]: row["vs_copy_and_check"]
        for row in rows
        if (row["megabytes"], row["instances"]) == (largest, 1)
    }
    return {f"{transport}_vs_copy": found.get(transport) for transport in (FOLDER, STREAM)}


@contextmanager
def _place(given: argparse.Namespace) -> Iterator[Path]:
    """Yield a folder for the run's files, which are removed at its end; the logs stay."""
    place: Path = ((given.folder or _roomy(given)) / "paceline-bench-weights").absolute()
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        yield place
    finally:
        shutil.copytree(place / "platform" / "logs", LOGS / "logs", dirs_exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)


def _roomy(given: argparse.Namespace) -> Path:
    """Return the folder in memory if all files of a run fit there, else a folder on disk."""
    # Each instance and the trainer hold a model in memory and up to three versions in files. The models themselves
    # are counted as well.
    holders = max(given.fleets) + 1
    versions = 1 + min(3, given.rounds + 1)
    needed = 1e6 * (versions * max(given.sizes) * holders + sum(given.sizes) + 500 * (holders + 1))
    if _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free > needed:
        return _IN_MEMORY
    console().print(f"{_IN_MEMORY} has no room for {needed / 1e9:.1f} GB; files are written to {LOGS}")
    return LOGS


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = option_parser(__doc__)
    add = parser.add_argument
    add("--sizes", type=numbers(int), default=[100, 300, 1000], help="MB of the models, by commas")
    add("--fleets", type=numbers(int), default=[1, 2, 4], help="numbers of instances, by commas")
    add("--rounds", type=int, default=1, help="timed pushes of each kind")
    add("--folder", type=Path, help="where the files lie")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
