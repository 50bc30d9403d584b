"""Order the steps of a run by their value: answers, then times, then the rest.

Building an engine takes the longest, so each is built once for its consecutive steps. A brief run has only the
first steps of each kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from bench.gpu.device import DeviceSetup
from bench.gpu.engines.setup import STOCK, EngineSetup
from bench.gpu.kernels.setup import KernelSetup
from bench.gpu.sizes import EngineKind, GpuCell, GpuDraft, GpuSizes, Graphs
from bench.gpu.state import (
    CEILINGS,
    ENVIRONMENT,
    KERNELS,
    SWEEP,
    TUNED_CHECKS,
    Arguments,
    GpuStep,
    State,
    tokens_name,
)

_FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class GpuSubject:
    """Model, device and settings of a run.

    `model` is a folder, and `load_format` the format of its weights. `dtype` applies to the engines. `device` is
    "cuda" or "cpu". `graphs` applies to the engines that come first. `prefill` is the estimated prefill speed in
    tokens a second.
    """

    model: Path
    load_format: str
    dtype: str
    device: str
    graphs: Graphs
    prefill: int
    out: Path
    sizes: GpuSizes


def plan(subject: GpuSubject) -> list[GpuStep]:
    """Return all steps for a subject."""
    steps = list(_device_first(subject))
    kinds = subject.sizes.kinds
    for kind in (EngineKind.V1, EngineKind.STOCK):
        if kind in kinds:
            steps += _first_minutes(subject, kind)
    kernels = list(_kernels(subject))
    steps += [step for step in kernels if step.brief]
    for kind in (EngineKind.V2, EngineKind.AHEAD):
        if kind in kinds:
            steps += _first_minutes(subject, kind)
    if EngineKind.INVARIANT in kinds:
        steps += _tokens(subject, _setup(subject, EngineKind.INVARIANT))
    for kind in (EngineKind.EAGLE3, EngineKind.QUANTIZED):
        if kind in kinds:
            steps.append(_passes(subject, kind))
    if EngineKind.STOCK_EAGLE3 in kinds:
        steps += _cells(subject, EngineKind.STOCK_EAGLE3, subject.sizes.brief_cells)
    if subject.device == "cuda":
        other = Graphs.DEFAULT if subject.graphs is Graphs.FULL else Graphs.FULL
        for kind in (EngineKind.V1, EngineKind.STOCK):
            steps += _cells(subject, kind, subject.sizes.brief_cells, other)
    for kind in (EngineKind.V1, EngineKind.STOCK, EngineKind.V2, EngineKind.AHEAD):
        if kind in kinds:
            steps += _the_rest(subject, kind)
    if EngineKind.TREES in kinds:
        steps += _tokens(subject, _setup(subject, EngineKind.TREES))
    if subject.dtype != _FLOAT32:
        exact = replace(subject, dtype=_FLOAT32)
        for kind in (EngineKind.V1, EngineKind.V2, EngineKind.AHEAD, EngineKind.TREES):
            if kind in kinds:
                steps += _tokens(exact, _setup(exact, kind))
    steps += [step for step in kernels if not step.brief]
    steps += _device_last(subject)
    return steps


def chosen(steps: Sequence[GpuStep], *, brief: bool, only: Sequence[str]) -> list[GpuStep]:
    """Return the steps of a brief run, or all; with `only`, the steps among them whose names match a pattern.

    The environment is always included, and so are steps whose results a chosen step needs.

    Raises:
        ValueError: a pattern matches nothing.
    """
    kept = [step for step in steps if step.brief or not brief]
    for pattern in only:
        if not any(fnmatchcase(step.name, pattern) for step in kept):
            raise ValueError(f"--only {pattern}: no step has such a name; --list prints them")
    if not only:
        return kept
    names = {step.name for step in kept if any(fnmatchcase(step.name, pattern) for pattern in only)}
    truths = {tokens_name(step.setup, "plain") for step in kept if step.name in names and _drafted(step)}
    needed = names | truths | {ENVIRONMENT}
    if any(isinstance(step.setup, KernelSetup) for step in kept if step.name in names):
        needed.add(CEILINGS)
    return [step for step in kept if step.name in needed]


def cell_name(kind: EngineKind, cell: GpuCell, graphs: Graphs | None = None) -> str:
    """Return the name of the step that times one cell; it names graphs that differ from the run's own."""
    return f"steps: {kind}{f', {graphs} graphs' if graphs else ''}, {cell.rows} x {cell.context}"


def _drafted(step: GpuStep) -> bool:
    return step.order == "tokens" and bool(step.arguments["drafts"])


def _setup(subject: GpuSubject, kind: EngineKind, graphs: Graphs | None = None) -> EngineSetup:
    sizes = subject.sizes
    return EngineSetup(
        kind,
        subject.model,
        subject.load_format,
        subject.dtype,
        graphs or subject.graphs,
        max(sizes.rows),
        sizes.longest,
        subject.out / "head",
        0 if kind in STOCK else sizes.draft_window,
        sizes.kv_bytes,
    )


def _device(subject: GpuSubject) -> DeviceSetup:
    return DeviceSetup(subject.device, subject.model, subject.sizes)


def _device_first(subject: GpuSubject) -> Iterator[GpuStep]:
    alone = _device(subject)
    yield GpuStep(ENVIRONMENT, alone, "environment", 2, brief=True)
    # Most of the estimate is loading vLLM's main library.
    yield GpuStep("libraries: RMSNorm", alone, "norm", 10, brief=True)
    yield GpuStep("libraries: attention", alone, "flash_attention", 3, brief=True)


def _device_last(subject: GpuSubject) -> Iterator[GpuStep]:
    alone = _device(subject)
    yield GpuStep("attention by itself", alone, "attention", 20)


def _first_minutes(subject: GpuSubject, kind: EngineKind) -> Iterator[GpuStep]:
    """Yield the token steps of an engine, and its first cells."""
    brief = kind in (EngineKind.V1, EngineKind.STOCK)
    if kind not in STOCK:
        yield from (replace(step, brief=brief) for step in _tokens(subject, _setup(subject, kind)))
    for step in _cells(subject, kind, subject.sizes.brief_cells):
        yield replace(step, brief=brief)


def _tokens(subject: GpuSubject, setup: EngineSetup) -> Iterator[GpuStep]:
    """Yield the steps that generate the same samples plainly and with drafts, of which some are wrong.

    An engine for trees also generates them with trees. The engine's own plain tokens are the truth.
    """
    sizes, truth = subject.sizes, tokens_name(setup, "plain")
    common: Arguments = {"count": sizes.exact, "tokens": sizes.tokens, "wrong": max(sizes.wrong)}
    longest = min(8, max(sizes.lengths))
    ways = [("plain", 0), ("drafts", longest)]
    if setup.kind is EngineKind.TREES:
        ways.append(("trees", longest))
    for way, length in ways:
        arguments = {**common, "drafts": length, "trees": way == "trees"}

        def more(state: State, length: int = length) -> Arguments:
            return {"truth": state.done[truth]["result"]["tokens"] if length else None}

        yield GpuStep(tokens_name(setup, way), setup, "tokens", 5, arguments, more)


def _cells(
    subject: GpuSubject, kind: EngineKind, cells: Sequence[GpuCell], graphs: Graphs | None = None
) -> Iterator[GpuStep]:
    """Yield the first measurement of some cells: plain, and with the drafts of a brief run."""
    for cell in cells:
        drafts = () if kind in STOCK else subject.sizes.brief_drafts
        yield _cell(subject, kind, cell, drafts, cell_name(kind, cell, graphs), graphs)


def _the_rest(subject: GpuSubject, kind: EngineKind) -> Iterator[GpuStep]:
    """Yield all other cells and drafts, and the measurements that an engine needs once."""
    sizes = subject.sizes
    for cell in sizes.cells:
        first = cell in sizes.brief_cells
        before = set(sizes.brief_drafts) if first else set()
        drafts = [draft for draft in sizes.drafts if draft not in before]
        if kind in STOCK:
            drafts = []
        if first and not drafts:
            continue
        name = cell_name(kind, cell) + (", all drafts" if first else "")
        yield _cell(subject, kind, cell, drafts, name)
    setup, cell = _setup(subject, kind), sizes.brief_cells[0]
    where: Arguments = {"rows": cell.rows, "context": cell.context}
    lengths = (0,) if kind in STOCK else (0, min(sizes.lengths))
    for length in lengths:
        yield GpuStep(f"waits: {kind}, {length} drafts", setup, "waits", 8, {**where, "length": length})
    if kind not in STOCK:
        longest = min(8, max(sizes.lengths))
        yield GpuStep(f"deciding: {kind}", setup, "deciding", 8, {**where, "length": longest})
        yield GpuStep(f"memory: {kind}", setup, "memory", 1)


def _cell(
    subject: GpuSubject,
    kind: EngineKind,
    cell: GpuCell,
    drafts: Sequence[GpuDraft],
    name: str,
    graphs: Graphs | None = None,
) -> GpuStep:
    steps = subject.sizes.steps
    arguments = {**asdict(cell), "steps": steps, "drafts": [(draft.length, draft.wrong) for draft in drafts]}
    # The plain run gives the truth of the longest drafts. Both kinds of steps are estimated at 30 ms.
    decoded = steps * (1 + max((draft.length for draft in drafts), default=0)) + steps * len(drafts)
    seconds = 0.5 + cell.rows * cell.context / subject.prefill + 0.03 * decoded
    return GpuStep(name, _setup(subject, kind, graphs), "cell", seconds, arguments)


def _passes(subject: GpuSubject, kind: EngineKind) -> GpuStep:
    rows = [each for each in subject.sizes.rows if each <= 64]
    arguments = {"rows": rows, "context": min(subject.sizes.contexts)}
    return GpuStep(f"draft passes: {kind}", _setup(subject, kind), "passes", 15, arguments)


def _kernels(subject: GpuSubject) -> Iterator[GpuStep]:
    from bench.gpu.kernels.steps import kernel_steps

    setup = KernelSetup(subject.device, subject.out / "tuned")
    known = kernel_steps(subject.device)
    checks = [step.name for step in known if step.name.startswith(TUNED_CHECKS)]

    def more(state: State) -> Arguments:
        return {
            "ceilings": state.result(CEILINGS),
            "values": {
                name.removeprefix(SWEEP): done["result"]["best"]
                for name, done in state.done.items()
                if name.startswith(SWEEP)
            },
            "wrong": [name for name in checks if name not in state.done],
        }

    for step in known:
        # The table of the defaults is measured with the defaults, even if sweeps have been done before.
        defaults = step.name.startswith((f"{KERNELS}exact: ", f"{KERNELS}defaults: "))
        own = (lambda state: {**more(state), "values": {}}) if defaults else more
        yield GpuStep(step.name, setup, "step", step.seconds, {"name": step.name}, own, step.brief)
