"""A run as Markdown: the table, sweeps, compiled code, and whatever failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kernels.tune.state import State

HEADS = ("kernel", "setting", "by", "time us", "GB/s", "TFLOP/s", "bound", "of bound", "ours is")

_LISTED = ("compiled code", "recompiles", "CUDA graphs", "host time of sampling", "tuned parameters")
"""Steps whose figures are listed as they are."""


def write(state: State) -> None:
    """Write report.md beside the state."""
    (state.path.parent / "report.md").write_text("\n".join(lines(state)) + "\n")


def lines(state: State) -> Iterator[str]:
    """Yield the lines of the report."""
    yield f"# Kernels on {state.about.get('device')}"
    yield ""
    yield ", ".join(f"{name}: {value}" for name, value in state.about.items() if name != "device")
    ceilings = state.done.get("ceilings", {}).get("result")
    if ceilings:
        yield (
            f"\nCeilings: copies {ceilings['bytes_per_second'] / 1e9:.0f} GB/s, products "
            f"{ceilings['flops'] / 1e12:.0f} TFLOP/s, Philox {ceilings['words_per_second'] / 1e9:.0f} G words/s"
        )
    yield f"\n## Failed ({len(state.failed)})\n"
    yield from (f"- {step}: {error}" for step, error in state.failed.items())
    for kind in ("tuned", "defaults"):
        rows = [
            row
            for step, made in state.done.items()
            if step.startswith(kind + ": ")
            for row in made["result"]["rows"]
        ]
        if rows:
            yield f"\n## Times, {kind}\n"
            yield from table(rows)
    yield from _sweeps(state)
    yield from _others(state)


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the rows of `measure.measured` as a Markdown table, errors below it."""
    yield _line(HEADS)
    yield _line(["---"] * len(HEADS))
    yield from (_line(_cells(row)) for row in rows)
    failed = [f"- {row['by']} ({row['setting']}): {row['error']}" for row in rows if "error" in row]
    if failed:
        yield ""
        yield from failed


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    names = (row["kernel"], row["setting"], row["by"])
    if "error" in row:
        return (*names, *["-"] * 6)
    return (
        *names,
        f"{row['seconds'] * 1e6:.1f}",
        f"{row['bytes_per_second'] / 1e9:.0f}",
        f"{row['flops'] / 1e12:.1f}" if row["flops"] else "-",
        row["bound_by"],
        f"{row['of_bound']:.0%}",
        "-" if row["ours_is"] is None else f"{row['ours_is']:.2f} x faster",
    )


def _sweeps(state: State) -> Iterator[str]:
    made = {step: done["result"] for step, done in state.done.items() if step.startswith("sweep: ")}
    if made:
        yield "\n## Sweeps\n"
    for step, result in made.items():
        tried = ", ".join(
            f"{row['value']}: {row['mean'] * 1e6:.1f} us"
            if "mean" in row
            else f"{row['value']}: {row['error']}"
            for row in result["tried"]
        )
        yield f"- {step.removeprefix('sweep: ')} = {result['best']} ({tried})"


def _others(state: State) -> Iterator[str]:
    for step in state.done:
        if step in _LISTED or step.startswith("engine step: "):
            yield f"\n## {step.capitalize()}\n"
            yield from (f"- {name}: {value}" for name, value in state.done[step]["result"].items())


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
