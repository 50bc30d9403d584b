"""A run as Markdown. Figures that are missing have the reason in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.engine_cuda.kinds import EngineKind
from bench.engine_cuda.plan import CudaStep, tokens_name
from bench.report import format_value
from kernels.tune.state import State

_REFERENCE = EngineKind.STOCK


def write(state: State, plan: Sequence[CudaStep]) -> None:
    """Write report.md beside the state."""
    (state.path.parent / "report.md").write_text("\n".join(lines(state, plan)) + "\n")


def lines(state: State, plan: Sequence[CudaStep]) -> Iterator[str]:
    """Yield the lines of the report."""
    yield f"# Engines on {state.about.get('device')}"
    yield ""
    over = sum(state.over(step.name) for step in plan)
    yield f"{over} of {len(plan)} steps are done, {len(state.failed)} of them failed."
    yield ""
    yield from _listed(_result(state, "environment"))
    if state.failed:
        yield "\n## Failed\n"
        yield from (
            f"- {name}: {error.strip().rpartition(chr(10))[2]}" for name, error in state.failed.items()
        )
    yield from _exactness(state, plan)
    yield from _step_times(state, plan)
    yield from _drafted(state, plan)
    yield from _waits(state, plan)
    yield from _others(state, plan)


def differences(
    truth: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]]
) -> tuple[int, int, int]:
    """Return tokens with the same prefix on both sides, samples that differ, and the first place of one that does.

    The place is -1 where none differs.
    """
    compared, places = 0, list[int]()
    for sample, expected in truth.items():
        pairs = list(zip(expected, found[sample], strict=False))
        place = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        if place is None and len(expected) != len(found[sample]):
            place = len(pairs)
        compared += len(pairs) if place is None else min(place + 1, len(pairs))
        if place is not None:
            places.append(place)
    return compared, len(places), min(places, default=-1)


def _exactness(state: State, plan: Sequence[CudaStep]) -> Iterator[str]:
    made = [step for step in plan if step.order == "tokens" and step.name in state.done]
    if not made:
        return
    yield "\n## Tokens\n"
    yield from _table_head(
        ("run", "samples that differ", "tokens compared", "first at", "accepted drafts", "steps")
    )
    first = next(step.setup.kind for step in plan if step.order == "tokens")
    for step in made:
        result = state.done[step.name]["result"]
        truth = _result(state, tokens_name(first, step.setup.dtype, "plain"))
        if truth is None:
            continue
        compared, differing, place = differences(truth["tokens"], result["tokens"])
        cells = (differing, compared, "-" if place < 0 else place, result["accepted"], result["steps"])
        yield _row(step.name.removeprefix("tokens: "), *cells)


def _step_times(state: State, plan: Sequence[CudaStep]) -> Iterator[str]:
    """Yield the table of plain decoding: milliseconds a step, and the device's idle time between two steps."""
    kinds = _kinds(plan)
    cells = {
        (step.arguments["rows"], step.arguments["context"], step.setup.kind): step.name
        for step in plan
        if step.order == "cell"
    }
    if not any(name in state.done for name in cells.values()):
        return
    yield "\n## Plain decoding: ms a step (times as long as stock); ms idle between two steps; graphs\n"
    yield from _table_head(("samples x context", *kinds))
    for rows, context in dict.fromkeys((rows, context) for rows, context, _ in cells):
        found = {kind: _plain(state, cells[rows, context, kind]) for kind in kinds}
        yield _row(f"{rows} x {context}", *(_time(found[kind], found.get(_REFERENCE)) for kind in kinds))


def _drafted(state: State, plan: Sequence[CudaStep]) -> Iterator[str]:
    kinds = [kind for kind in _kinds(plan) if kind is not EngineKind.STOCK]
    found: dict[tuple[str, str], dict[EngineKind, Mapping[str, Any]]] = {}
    for step in plan:
        result = _result(state, step.name) if step.order == "cell" else None
        for run in (result or {}).get("runs", ()):
            if run["drafts"]:
                setting = f"{run['drafts']} drafts, {run['wrong']:.0%} wrong"
                place = (f"{step.arguments['rows']} x {step.arguments['context']}", setting)
                found.setdefault(place, {})[step.setup.kind] = run
    if not found:
        return
    yield "\n## Drafts: ms a step, tokens a sample and step, tokens a second; ms idle; graphs\n"
    yield from _table_head(("samples x context", "drafts", *kinds))
    for (where, setting), runs in found.items():
        yield _row(where, setting, *(_drafted_cell(runs.get(kind)) for kind in kinds))


def _waits(state: State, plan: Sequence[CudaStep]) -> Iterator[str]:
    made = [
        (step, state.done[step.name]["result"])
        for step in plan
        if step.order == "waits" and step.name in state.done
    ]
    if not made:
        return
    yield "\n## A step's waits for the device, and its copies\n"
    yield from _table_head(("engine", "drafts", "waits", "where", "copies"))
    for step, result in made:
        where = ", ".join(f"{place} {times:g}" for place, times in result["waits"].items())
        copies = ", ".join(f"{name} {times:g}" for name, times in result["copies"].items())
        waits = sum(result["waits"].values())
        yield _row(step.setup.kind, result["drafts"], f"{waits:g}", where or "-", copies or "-")


def _others(state: State, plan: Sequence[CudaStep]) -> Iterator[str]:
    if (race := _result(state, "attention")) is not None:
        yield f"\n## Attention by itself: {race['fastest']}\n"
        yield from _table_head(("case", "backend", "us"))
        for each in race["timings"]:
            yield _row(each["case"], each["backend"], each["error"] or f"{1e6 * each['seconds']:.1f}")
    if (sampling := _result(state, "sampling")) is not None:
        yield "\n## Sampling by itself\n"
        yield from _table_head(("logits", "by", "ms"))
        for row in sampling["rows"]:
            yield _row(row["setting"], row["by"], row.get("error") or format_value(row["ms"]))
    for step in plan:
        if step.order in ("deciding", "memory") and (result := _result(state, step.name)) is not None:
            yield f"\n## {step.name.capitalize()}\n"
            yield from _listed(result)


def _plain(state: State, name: str) -> Mapping[str, Any] | str:
    """Return the run without drafts of a step, or why there is none."""
    if name in state.failed:
        return "failed"
    result = _result(state, name)
    if result is None:
        return "-"
    return result["runs"][0] if "runs" in result else "skipped"


def _time(run: Mapping[str, Any] | str, stock: Mapping[str, Any] | str | None) -> str:
    if isinstance(run, str):
        return run
    ratio = ""
    if stock is not None and not isinstance(stock, str) and run["step_ms"] and stock["step_ms"]:
        ratio = f" ({run['step_ms'] / stock['step_ms']:.2f})"
    return f"{format_value(run['step_ms'])}{ratio}; {format_value(run['idle_ms'])}; {_graphs(run)}"


def _drafted_cell(run: Mapping[str, Any] | None) -> str:
    if run is None:
        return "-"
    figures = (run["step_ms"], run["tokens_a_step"], run["tokens_a_second"])
    return f"{', '.join(map(format_value, figures))}; {format_value(run['idle_ms'])}; {_graphs(run)}"


def _graphs(run: Mapping[str, Any]) -> str:
    return ", ".join(f"{mode} {times}" for mode, times in run["graphs"].items()) or "none"


def _kinds(plan: Sequence[CudaStep]) -> list[EngineKind]:
    return list(dict.fromkeys(step.setup.kind for step in plan if step.order == "cell"))


def _result(state: State, name: str) -> dict[str, Any] | None:
    done = state.done.get(name)
    return None if done is None else done["result"]


def _listed(result: Mapping[str, Any] | None) -> Iterator[str]:
    yield from (f"- {name}: {format_value(value)}" for name, value in (result or {}).items())


def _table_head(heads: Sequence[str]) -> Iterator[str]:
    yield _row(*heads)
    yield _row(*["---"] * len(heads))


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"
