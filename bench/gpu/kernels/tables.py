"""Build the tables of the kernels: times compared with other libraries, sweeps, compiled code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bench.gpu.state import CEILINGS, KERNELS, SWEEP, State
from bench.report import listed, markdown_table

HEADS = (
    "kernel", "setting", "by", "device us", "host us", "GB/s", "TFLOP/s", "bound", "of bound", "ours is",
)  # fmt: skip
_LISTED = ("compiled code", "recompiles", "CUDA graphs", "host time of sampling", "tuned parameters")
"""Steps whose figures are listed unchanged."""


def kernel_tables(state: State) -> Iterator[str]:
    """Yield all tables of the kernels."""
    ceilings = state.result(CEILINGS)
    if ceilings:
        yield (
            f"\nCeilings: copies {ceilings['bytes_per_second'] / 1e9:.0f} GB/s, products "
            f"{ceilings['flops'] / 1e12:.0f} TFLOP/s, Philox {ceilings['words_per_second'] / 1e9:.0f} G words/s"
        )
    for kind in ("tuned", "defaults"):
        rows = [
            each
            for step, made in state.done.items()
            if step.startswith(f"{KERNELS}{kind}: ")
            for each in made["result"]["rows"]
        ]
        if rows:
            yield f"\n## Kernels, {kind} (*: not captured in a graph, so launches are in the device's time)\n"
            yield from table(rows)
    yield from _sweeps(state)
    for step in state.done:
        name = step.removeprefix(KERNELS)
        if name in _LISTED or name.startswith("engine step: "):
            yield f"\n## {name.capitalize()}\n"
            yield from listed(state.result(step))


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the rows of `measure.measured` as a Markdown table, with errors below it."""
    yield from markdown_table(HEADS, map(_cells, rows))
    failed = [f"- {each['by']} ({each['setting']}): {each['error']}" for each in rows if "error" in each]
    if failed:
        yield ""
        yield from failed


def _cells(found: dict[str, Any]) -> tuple[str, ...]:
    names = (found["kernel"], found["setting"], found["by"])
    if "error" in found:
        return (*names, *["-"] * (len(HEADS) - len(names)))
    return (
        *names,
        f"{found['seconds'] * 1e6:.1f}{'' if found['in_graph'] else '*'}",
        f"{found['host_seconds'] * 1e6:.1f}",
        f"{found['bytes_per_second'] / 1e9:.0f}",
        f"{found['flops'] / 1e12:.1f}" if found["flops"] else "-",
        found["bound_by"],
        f"{found['of_bound']:.0%}",
        "-" if found["ours_is"] is None else f"{found['ours_is']:.2f} x faster",
    )


def _sweeps(state: State) -> Iterator[str]:
    made = {step: done["result"] for step, done in state.done.items() if step.startswith(SWEEP)}
    if made:
        yield "\n## Sweeps\n"
    for step, result in made.items():
        tried = ", ".join(
            f"{each['value']}: {each['mean'] * 1e6:.1f} us"
            if "mean" in each
            else f"{each['value']}: {each['error']}"
            for each in result["tried"]
        )
        yield f"- {step.removeprefix(SWEEP)} = {result['best']} ({tried})"
