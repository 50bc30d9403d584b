"""Render a run as Markdown: the device, failures, and the tables of engines and kernels; and keep it as figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from bench.comparison import first_difference
from bench.gpu.engines.setup import STOCK, EngineSetup
from bench.gpu.running import CEILINGS, ENVIRONMENT, KERNELS, SWEEP, GpuStep, State, last_line, tokens_name
from bench.gpu.sizes import EngineKind
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


Column = tuple[EngineKind, str]
"""An engine and its graphs."""
Runs = Mapping[str, Any]
Rows = Sequence[Sequence[object]]


class EngineTable(NamedTuple):
    """A table: its name in kept figures, its title and its contents. Without rows nothing was measured."""

    name: str
    title: str
    heads: Sequence[str]
    rows: Rows


def engine_tables(state: State, steps: Sequence[GpuStep]) -> list[EngineTable]:
    """Return the main tables: tokens, step times, drafts, replays, draft models."""
    return [build(state, steps) for build in (_tokens, _plain, _drafted, _replays, _passes)]


def main_tables(state: State, steps: Sequence[GpuStep]) -> Iterator[str]:
    """Yield the kernels that are left out, and the main tables that have rows."""
    yield from _left_out(state, steps)
    for table in engine_tables(state, steps):
        if table.rows:
            yield f"\n## {table.title}\n"
            yield from markdown_table(table.heads, table.rows)


def other_tables(state: State, steps: Sequence[GpuStep]) -> Iterator[str]:
    """Yield the tables of waits, decisions and memory."""
    yield from _waits(state, steps)
    for step in steps:
        if step.order in ("deciding", "memory") and (result := state.result(step.name)) is not None:
            yield f"\n## {step.name.capitalize()}\n"
            yield from listed(result)


def differences(
    truth: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]]
) -> tuple[int, int, int]:
    """Return the numbers of tokens with equal prefixes and of differing samples, and the first differing position.

    The position is -1 if no sample differs.
    """
    compared, places = 0, list[int]()
    for sample, expected in truth.items():
        place, both = first_difference(expected, found[sample]), min(len(expected), len(found[sample]))
        compared += both if place is None else min(place + 1, both)
        if place is not None:
            places.append(place)
    return compared, len(places), min(places, default=-1)


def _tokens(state: State, steps: Sequence[GpuStep]) -> EngineTable:
    made = [step for step in steps if step.order == "tokens" and step.name in state.done]
    first: dict[str, str] = {}
    for step in made:
        assert isinstance(step.setup, EngineSetup)
        first.setdefault(step.setup.dtype, step.name)
    rows = []
    for step in made:
        assert isinstance(step.setup, EngineSetup)
        result = state.done[step.name]["result"]
        own = state.result(tokens_name(step.setup, "plain"))
        from_own = "-" if own is None or own is result else _differing(own, result)
        from_first = _differing(state.done[first[step.setup.dtype]]["result"], result)
        count = sum(map(len, result["tokens"].values()))
        name = step.name.removeprefix("tokens: ")
        rows.append((name, from_own, from_first, count, result["accepted"], result["steps"]))
    heads = ("run", "from its plain run", "from the first of its type", "tokens", "accepted drafts", "steps")
    return EngineTable("tokens", "Tokens: samples that differ (first place)", heads, rows)


def _differing(truth: Runs, found: Runs) -> str:
    _, differing, place = differences(truth["tokens"], found["tokens"])
    return f"{differing}" if place < 0 else f"{differing} ({place})"


def _plain(state: State, steps: Sequence[GpuStep]) -> EngineTable:
    """Return plain decoding: milliseconds a step, and the device's idle time between two steps."""
    columns = _columns(steps)
    found: dict[str, dict[Column, Runs | str]] = {}
    for step in steps:
        if step.order == "cell" and state.over(step.name):
            cells = found.setdefault(_place(step), {})
            # The plain run of a second measurement only serves its drafts.
            cells.setdefault(_column(step), _plain_run(state, step.name))
    stock = next((column for column in columns if column[0] is EngineKind.STOCK), None)
    rows = [
        (place, *(_time(cells.get(column, "-"), cells.get(stock) if stock else None) for column in columns))
        for place, cells in found.items()
    ]
    title = "Plain decoding: ms a step (times as long as stock); ms idle between two steps; graphs"
    return EngineTable("plain", title, ("samples x context", *map(_head, columns)), rows)


def _drafted(state: State, steps: Sequence[GpuStep]) -> EngineTable:
    columns = [column for column in _columns(steps) if column[0] not in STOCK]
    found: dict[tuple[str, int, float], dict[Column, Runs]] = {}
    plain: dict[tuple[str, Column], Runs] = {}
    for step in steps:
        result = state.result(step.name) if step.order == "cell" else None
        for run in (result or {}).get("runs", ()):
            if run["drafts"]:
                found.setdefault((_place(step), run["drafts"], run["wrong"]), {})[_column(step)] = run
            else:
                plain.setdefault((_place(step), _column(step)), run)
    rows = [
        (
            place,
            f"{length}, {wrong:.0%} wrong",
            *(_drafted_cell(runs.get(column), plain.get((place, column))) for column in columns),
        )
        for (place, length, wrong), runs in sorted(found.items())
    ]
    title = "Drafts: ms a step (times a plain one), tokens a sample and step, speed-up; ms idle; graphs"
    return EngineTable("drafts", title, ("samples x context", "drafts", *map(_head, columns)), rows)


def _left_out(state: State, steps: Sequence[GpuStep]) -> Iterator[str]:
    """Yield the engines whose kernels failed their check. They sample on the host, which changes their times."""
    found = [(step.name, state.result(step.name) or {}) for step in steps if step.order == "memory"]
    lines = [
        f"- {name.removeprefix('memory: ')}: {', '.join(result['failed_kernels'])}"
        for name, result in found
        if result.get("failed_kernels")
    ]
    if lines:
        yield "\n## Kernels that failed their check, and are left out\n"
        yield from lines


def _replays(state: State, steps: Sequence[GpuStep]) -> EngineTable:
    made = [step for step in steps if step.order == "replay" and state.over(step.name)]
    results = {step.name: state.result(step.name) for step in made}
    stock = {
        found["tokens"]: found["seconds"]
        for found in results.values()
        if found is not None and found.get("engine", [""])[0] == EngineKind.STOCK and "seconds" in found
    }
    heads = (
        "engine, samples x tokens", "s", "tokens a sample and step", "ms a step", "ms decision", "ms idle",
        "accepted drafts", "graphs",
    )  # fmt: skip
    rows = [(step.name.removeprefix("replay: "), *_replay(results[step.name], stock)) for step in made]
    return EngineTable(
        "replays", "Replays: the same tokens by every engine (speed-up over stock)", heads, rows
    )


def _replay(found: Runs | None, stock: Mapping[int, float]) -> tuple[str, ...]:
    """Return the cells of a replay; one without figures has the reason in the first."""
    if found is None or "skipped" in found:
        return ("failed" if found is None else found["skipped"], *["-"] * 6)
    base, drafted = stock.get(found["tokens"]), found["drafted"]
    speedup = f" ({base / found['seconds']:.2f})" if base is not None else ""
    shares = f"{found['accepted'] / drafted:.0%} of {drafted}" if drafted else "-"
    names = ("tokens_a_step", "step_ms", "decision_ms", "idle_ms")
    figures = (format_value(found[name]) for name in names)
    return (f"{format_value(found['seconds'])}{speedup}", *figures, shares, _graphs(found))


def _passes(state: State, steps: Sequence[GpuStep]) -> EngineTable:
    rows = [
        (step.name.removeprefix("draft passes: "), each["rows"], each["tokens"], format_value(each["ms"]))
        for step in steps
        if step.order == "passes"
        for each in (state.result(step.name) or {}).get("passes", ())
    ]
    title = "Draft models: ms for the drafts of a step, launched kernel by kernel"
    return EngineTable("passes", title, ("engine", "samples", "draft tokens each", "ms"), rows)


def _waits(state: State, steps: Sequence[GpuStep]) -> Iterator[str]:
    rows = []
    for step in steps:
        result = state.result(step.name) if step.order == "waits" else None
        if result is not None:
            places = ", ".join(f"{place} {times:g}" for place, times in result["waits"].items())
            copies = ", ".join(f"{name} {times:g}" for name, times in result["copies"].items())
            waits = sum(result["waits"].values())
            rows.append((step.name, f"{waits:g}", places or "-", copies or "-"))
    if rows:
        yield "\n## A step's waits for the device, and its copies\n"
        yield from markdown_table(("engine", "waits", "where", "copies"), rows)


def _columns(steps: Sequence[GpuStep]) -> list[Column]:
    return list(dict.fromkeys(_column(step) for step in steps if step.order == "cell"))


def _column(step: GpuStep) -> Column:
    assert isinstance(step.setup, EngineSetup)
    return step.setup.kind, step.setup.graphs


def _head(column: Column) -> str:
    return f"{column[0]}, {column[1]} graphs"


def _place(step: GpuStep) -> str:
    return f"{step.arguments['rows']} x {step.arguments['context']}"


def _plain_run(state: State, name: str) -> Runs | str:
    """Return a step's run without drafts, or the reason why there is none."""
    result = state.result(name)
    if result is None:
        return "failed"
    plain: Runs | str = result["runs"][0] if "runs" in result else "does not fit"
    return plain


def _time(run: Runs | str, stock: Runs | str | None) -> str:
    if isinstance(run, str):
        return run
    ratio = ""
    if stock is not None and not isinstance(stock, str) and run["step_ms"] and stock["step_ms"]:
        ratio = f" ({run['step_ms'] / stock['step_ms']:.2f})"
    return f"{format_value(run['step_ms'])}{ratio}; {format_value(run['idle_ms'])}; {_graphs(run)}"


def _drafted_cell(run: Runs | None, plain: Runs | None) -> str:
    if run is None:
        return "-"
    times = speedup = ""
    if plain is not None and plain["step_ms"] and run["step_ms"]:
        times = f" ({run['step_ms'] / plain['step_ms']:.2f})"
        speedup = f"{run['tokens_a_second'] / plain['tokens_a_second']:.2f}"
    step, idle, tokens = (format_value(run[name]) for name in ("step_ms", "idle_ms", "tokens_a_step"))
    return f"{step}{times}, {tokens}, {speedup or '-'}; {idle}; {_graphs(run)}"


def _graphs(run: Runs) -> str:
    return ", ".join(f"{mode} {times}" for mode, times in run["graphs"].items()) or "none"


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
