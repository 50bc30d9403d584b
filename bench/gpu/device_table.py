"""Make the simulator's table of a device from a run there.

    python -m bench.gpu.device_table runs/gpu [--kind V1] [--graphs full] [--name "q17 H100"] [--out FILE]

The table has the milliseconds of a step by verified tokens, and the milliseconds that each token of context and
each sample adds, fitted to the cells of one engine. `paceline simulate --table` reads the file. In
services/simulator/measured it becomes one of the devices by name. The command prints the error of the fit.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from bench.gpu.running import ENVIRONMENT, State
from bench.gpu.sizes import EngineKind, Graphs
from bench.report import option_parser
from services.simulator.device_tables import DeviceFile

_NEAR = 0.05
"""Steps whose numbers of rows differ by at most this share count as equal."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step of a cell: samples, verified tokens, context tokens of all samples, and its median milliseconds."""

    samples: int
    rows: int
    context: float
    milliseconds: float


@dataclass(frozen=True, slots=True)
class FittedTable:
    """Milliseconds by rows, and the milliseconds that each sample and each context token adds."""

    rows: Sequence[int]
    milliseconds: Sequence[float]
    per_sample: float
    per_context: float

    def predicted(self, step: TimedStep) -> float:
        """Return the milliseconds of a step whose number of rows is in the table."""
        place = next(i for i, rows in enumerate(self.rows) if rows >= step.rows)
        return self.milliseconds[place] + self.per_sample * step.samples + self.per_context * step.context


def fitted(steps: Sequence[TimedStep]) -> FittedTable:
    """Fit a table: context by steps that differ in nothing else, then samples, then the rest by rows.

    Raises:
        ValueError: no batch has two contexts.
    """
    by_batch = defaultdict[tuple[int, int], list[TimedStep]](list)
    for step in steps:
        by_batch[step.samples, step.rows].append(step)
    slopes = [
        (longer.milliseconds - shorter.milliseconds) / (longer.context - shorter.context)
        for batch in by_batch.values()
        for shorter, longer in pairwise(sorted(batch, key=lambda step: step.context))
        if longer.context > shorter.context
    ]
    if not slopes:
        raise ValueError("no batch was measured with two contexts: what a token of context adds is not known")
    per_context = max(0.0, median(slopes))

    def without_context(step: TimedStep) -> float:
        return step.milliseconds - per_context * step.context

    slopes = [
        (without_context(more) - without_context(fewer)) / (more.samples - fewer.samples)
        for fewer in steps
        for more in steps
        if more.samples > fewer.samples and abs(more.rows - fewer.rows) <= _NEAR * fewer.rows
    ]
    per_sample = max(0.0, median(slopes)) if slopes else 0.0
    rest = defaultdict[int, list[float]](list)
    for step in steps:
        rest[step.rows].append(without_context(step) - per_sample * step.samples)
    rows = sorted(rest)
    milliseconds, least = [], 1e-6
    for count in rows:
        # A step with more rows does not take less time; a smaller median is noise.
        least = max(least, median(rest[count]))
        milliseconds.append(least)
    return FittedTable(rows, milliseconds, per_sample, per_context)


def measured_steps(state: State, kind: EngineKind, graphs: Graphs) -> Iterator[TimedStep]:
    """Yield the measured steps of an engine's cells."""
    for name, done in state.done.items():
        result = done["result"]
        if not name.startswith("steps: ") or result.get("engine") != [kind.value, graphs.value]:
            continue
        for run in result.get("runs", ()):
            if run["step_ms"]:
                samples, drafts = result["rows"], run["drafts"]
                # Half of the tokens that the timed steps generate exist in the middle of them.
                context = result["context"] + run["tokens_a_step"] * run["steps"] / 2
                yield TimedStep(samples, samples * (1 + drafts), samples * context, run["step_ms"])


def table_of(state: State, kind: EngineKind, graphs: Graphs, name: str) -> tuple[DeviceFile, list[float]]:
    """Return the table of an engine, and the relative error of each measured step.

    Raises:
        ValueError: the engine's cells were not measured.
    """
    steps = list(measured_steps(state, kind, graphs))
    if not steps:
        raise ValueError(f"{state.path} has no cells of {kind} with {graphs} graphs")
    memory = state.result(f"memory: {kind}") or {}
    fit = fitted(steps)
    environment = state.result(ENVIRONMENT) or {}
    software = ", ".join(f"{each} {environment.get(each)}" for each in ("vllm", "torch"))
    file = DeviceFile(
        name=name,
        source=f"measured: {state.about['device']}, {kind}, {graphs} graphs, {software}",
        kv_tokens=int(memory.get("kv_tokens") or max(step.context for step in steps)),
        rows=list(fit.rows),
        milliseconds=list(fit.milliseconds),
        per_sample=fit.per_sample,
        per_context=fit.per_context,
        # The measured sizes are not the captured ones. Times between them are interpolated.
        graphs=[],
        most_rows=max(fit.rows),
    )
    return file, [fit.predicted(step) / step.milliseconds - 1 for step in steps]


def main(given: Sequence[str] | None = None) -> int:
    """Write the table of a run; return the exit status."""
    options = _parsed(given)
    state = State.load(options.run / "state.json")
    if state is None:
        return _refused(f"{options.run} has no state.json")
    kind, graphs = EngineKind(options.kind), Graphs(options.graphs)
    try:
        file, errors = table_of(state, kind, graphs, options.name or f"{state.about['model']} {kind}")
    except ValueError as error:
        return _refused(str(error))
    out = options.out or options.run / "device.json"
    out.write_text(file.model_dump_json(indent=1) + "\n")
    print(f"written to {out}; {_off(errors)}")
    return 0


def _off(errors: Iterable[float]) -> str:
    sizes = sorted(map(abs, errors))
    return f"{len(sizes)} steps are {median(sizes):.1%} off in the median, {sizes[-1]:.1%} at most"


def _refused(why: str) -> int:
    print(f"bench.gpu.device_table: {why}", file=sys.stderr)
    return 2


def _parsed(given: Sequence[str] | None) -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("run", type=Path, help="folder of a run of bench.gpu")
    parser.add_argument("--kind", choices=tuple(EngineKind), default=EngineKind.V1)
    parser.add_argument("--graphs", choices=tuple(Graphs), default=Graphs.FULL)
    parser.add_argument("--name", help="name of the device (default: model and engine)")
    parser.add_argument("--out", type=Path, help="file, by default device.json in the run's folder")
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
