"""Measure the path of weights from a trainer to its instances: seconds, bytes, memory, and pauses in decoding.

    make bench NAME=weights

Models of `--sizes` are made on the spot. A trainer in a separate process pushes them through a real gateway to real
instances, each with its own folder:

- transfers: 1, 2 and 4 instances, by folder and by stream, over loopback, and by stream over links with a tenth of
  loopback's rate. In place of an engine each holds the model and copies new weights into it.
- engines: one instance with vLLM's engine, which decodes while weights arrive (CONTINUE).

Files are in `--folder`, by default in memory (/dev/shm) if there is room, so that Paceline is measured and not a
disk. The baselines are measured in the same place, in the same run.
"""

from __future__ import annotations

import argparse
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.progress import PartsProgress
from bench.report import console, format_value, numbers, option_parser, show, show_table, write
from bench.weights.fleet import Model, Pushes, engine_pushes, transfers
from bench.weights.links import loopback_rate
from bench.weights.memory import available_bytes
from bench.weights.models import make_models, reference, weight_bytes
from bench.weights.summary import FOLDER, GOALS, STREAM, summary, verdicts

LOGS = Path("runs/bench/weights")
_IN_MEMORY = Path("/dev/shm")
_PROBE_BYTES = 1 << 30
_TOLD = ("engine", "transport", "links", "megabytes", "instances", "seconds", "vs_copy_and_check")
Row = dict[str, Any]


def main() -> None:
    """Measure the parts, then show and write the figures."""
    warnings.simplefilter("ignore", SyntaxWarning)  # of packages that reasoning-gym imports
    given = arguments()
    with _place(given) as place, PartsProgress(_plan(given)) as progress:
        measured = _measure(given, place, progress)
    _show(measured)
    figures = summary(measured["transfers"], measured["engines"])
    reached = verdicts(figures, measured["engines"])
    show("weights", figures)
    console().print(f"goals reached: {reached}")
    options = {name: str(value) for name, value in vars(given).items()}
    write("weights", {**figures, "goals": GOALS, "goals_reached": reached, **measured, "options": options})


def _plan(given: argparse.Namespace) -> list[tuple[str, float]]:
    """Return the parts of a run and their seconds on two quiet cores."""
    largest = max(given.sizes)
    total = sum(given.sizes)
    fleets = sum(given.fleets)
    parts = [("models", 15 + total / 100)]
    parts += [(f"{size} MB, loopback", 15 + size * fleets / 100) for size in given.sizes]
    parts.append((f"{largest} MB, throttled links", 20 + largest / 20 * len(given.fleets)))
    parts += [(f"{size} MB, vLLM", 45 + size / 20) for size in given.engine_sizes]
    return parts


def _measure(given: argparse.Namespace, place: Path, progress: PartsProgress) -> Row:
    progress.begin("models")
    sizes = sorted({*given.sizes, *given.engine_sizes})
    models = {
        size: Model(size, folder, reference(folder, place / "reference"))
        for size, folder in make_models(place, sizes).items()
    }
    rate = loopback_rate(_PROBE_BYTES)
    rows: list[Row] = []
    for size in given.sizes:
        progress.begin(f"{size} MB, loopback")
        pushes = Pushes(sorted(given.fleets, reverse=True), (FOLDER, STREAM), given.rounds)
        rows += _told(transfers(models[size], place / "platform", pushes, None))
    largest = max(given.sizes)
    progress.begin(f"{largest} MB, throttled links")
    pushes = Pushes(sorted(given.fleets, reverse=True), (STREAM,), 1)
    rows += _told(transfers(models[largest], place / "platform", pushes, rate / 10))
    engines: list[Row] = []
    for size in given.engine_sizes:
        progress.begin(f"{size} MB, vLLM")
        engines += _told(engine_pushes(models[size], place / "platform", (FOLDER, STREAM)))
    return {
        "transfers": rows,
        "engines": engines,
        "references": {
            str(size): {
                "model_bytes": weight_bytes(model.folder),
                "copy_seconds": model.reference.copy,
                "check_seconds": model.reference.check,
                "memory_copy_seconds": model.reference.memory_copy,
            }
            for size, model in models.items()
        },
        "loopback_bytes_per_second": rate,
        "files_in": str(place.parent),
    }


def _told(rows: Iterator[Row]) -> Iterator[Row]:
    """Print each row as soon as it is measured, so that an interrupted run has shown its rows."""
    for row in rows:
        told = ", ".join(f"{name} {format_value(row[name])}" for name in _TOLD if name in row)
        console().print(f"  {told}", highlight=False)
        yield row


@contextmanager
def _place(given: argparse.Namespace) -> Iterator[Path]:
    """Yield a folder for the run's files, which are removed at its end; the logs stay."""
    parent = given.folder or _roomy(_room_needed(given))
    place: Path = (parent / "paceline-bench-weights").absolute()
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        yield place
    finally:
        shutil.copytree(place / "platform" / "logs", LOGS / "logs", dirs_exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)


def _room_needed(given: argparse.Namespace) -> float:
    """Return the bytes of memory that a run takes with its files in memory."""
    largest, fleet = max(given.sizes), max(given.fleets)
    # Each instance and the trainer hold a model in memory and up to three versions in files. The models themselves
    # are counted as well.
    return 1e6 * (
        (1 + min(3, given.rounds + 1)) * largest * (fleet + 1) + sum(given.sizes) + 500 * (fleet + 2)
    )


def _roomy(needed: float) -> Path:
    if _IN_MEMORY.is_dir() and min(available_bytes(), shutil.disk_usage(_IN_MEMORY).free) > needed:
        return _IN_MEMORY
    console().print(f"{_IN_MEMORY} has no room for {needed / 1e9:.1f} GB; files are written to {LOGS}")
    return LOGS


def _show(measured: Row) -> None:
    columns = (
        ("seconds", "seconds"),
        ("/ (copy + check)", "vs_copy_and_check"),
        ("copy s", "copy_seconds"),
        ("check s", "check_seconds"),
        ("stage s", "stage_seconds"),
        ("apply s", "apply_seconds"),
        ("trainer MB", "trainer_mb"),
        ("trainer peak, models", "trainer_peak_memory_models"),
        ("instance peak, models", "instance_peak_memory_models"),
    )
    table = {
        f"{row['transport']}, {row['megabytes']} MB, {row['links']}, {row['instances']}": {
            **row,
            "trainer_mb": row["trainer_bytes"] / 1e6,
        }
        for row in measured["transfers"]
    }
    show_table("transfers", columns, table)
    names: tuple[str, ...] = (
        "seconds",
        "decoding_gap_ms",
        "memory_copy_ms",
        "apply_ms",
        "prefill_ms",
        "step_ms",
    )
    names += ("step_while_staging_ms", "slowest_step_ms", "serving_private_mb", "peak_private_mb")
    table = {f"{row['transport']}, {row['megabytes']} MB": row for row in measured["engines"]}
    show_table("vLLM's engine", [(name, name) for name in (*names, "peak_memory_models")], table)
    rate = measured["loopback_bytes_per_second"] / 1e6
    console().print(f"loopback, one stream of gRPC: {format_value(rate)} MB/s", highlight=False)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = option_parser(__doc__)
    add = parser.add_argument
    add("--sizes", type=numbers(int), default=[100, 300, 1000], help="MB of the models, by commas")
    add("--fleets", type=numbers(int), default=[1, 2, 4], help="numbers of instances, by commas")
    add("--engine-sizes", type=numbers(int), default=[100, 1000], help="MB of the models of vLLM's engine")
    add("--rounds", type=int, default=1, help="timed pushes of each kind")
    add("--folder", type=Path, help="where the files lie")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
