"""Render a run as Markdown: the device, failures, and the tables of engines and kernels; and keep it as figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from bench.gpu.engines.tables import engine_tables, main_tables, other_tables
from bench.gpu.kernels.tables import kernel_tables
from bench.gpu.running import last_line
from bench.gpu.state import ENVIRONMENT, GpuStep, State
from bench.measured_code import snapshot
from bench.report import format_value, keep, listed, markdown_table

FIGURES = "gpu.json"
"""Name of the file with the main tables as data, which `python -m bench.nightly --publish gpu` takes."""


def write(state: State, steps: Sequence[GpuStep]) -> None:
    """Write report.md and the figures next to the state file."""
    (state.path.parent / "report.md").write_text("\n".join(lines(state, steps)) + "\n")
    keep(state.path.parent / FIGURES, figures(state, steps), indent=1)


def figures(state: State, steps: Sequence[GpuStep]) -> dict[str, Any]:
    """Return the main tables by name, the machine, the time and the code, in the form of other benchmarks' results.

    The first head of a table names the device.
    """
    environment = state.result(ENVIRONMENT) or {}
    device = f"{state.about.get('device')}, vLLM {state.about.get('vllm')}"
    tables = {
        table.name: {
            "columns": [f"{table.heads[0]} ({device})", *table.heads[1:]],
            "rows": [list(map(str, row)) for row in table.rows],
        }
        for table in engine_tables(state, steps)
    }
    return {
        "tables": tables,
        "machine": {"cpus": environment.get("cores"), "processor": device},
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "code": snapshot("gpu"),
    }


def lines(state: State, steps: Sequence[GpuStep]) -> Iterator[str]:
    """Yield the lines of the report."""
    yield f"# {state.about.get('device')}, {state.about.get('model')}"
    yield ""
    yield from listed(state.result(ENVIRONMENT))
    yield from summary(state, steps)
    yield from other_tables(state, steps)
    yield from _alone(state)
    yield from kernel_tables(state)


def summary(state: State, steps: Sequence[GpuStep]) -> Iterator[str]:
    """Yield the summary of a run: how much is done, what failed, and the main tables."""
    over = sum(state.over(step.name) for step in steps)
    yield f"\n{over} of {len(steps)} steps are done, {len(state.failed)} failed."
    if state.failed:
        yield "\n## Failed\n"
        yield from (f"- {name}: {last_line(error)}" for name, error in state.failed.items())
    libraries = {name: state.result(f"libraries: {name}") for name in ("RMSNorm", "attention")}
    if any(libraries.values()):
        yield "\n## vLLM's libraries: relative error against float32\n"
        yield from (f"- {name}: {format_value(found['error'])}" for name, found in libraries.items() if found)
    yield from main_tables(state, steps)


def _alone(state: State) -> Iterator[str]:
    if (race := state.result("attention by itself")) is not None:
        yield f"\n## Attention by itself: {race['fastest']}\n"
        rows = [
            (each["case"], each["backend"], each["error"] or f"{1e6 * each['seconds']:.1f}")
            for each in race["timings"]
        ]
        yield from markdown_table(("case", "backend", "us"), rows)
