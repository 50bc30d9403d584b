"""Order the steps of a run by their value: answers, then times, then the rest.

Building an engine takes the longest, so each is built once for its consecutive steps. A brief run has only the
first steps of each kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from bench.gpu.device import DeviceSetup, KernelSetup
from bench.gpu.engines.setup import LOAD_FORMAT, PREFILL, STOCK, EngineSetup
from bench.gpu.running import (
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
from bench.gpu.sizes import EngineKind, GpuCell, GpuDraft, GpuSizes, Graphs, TextDrift

_FLOAT32 = "float32"
_REPLAYED = (
    EngineKind.AHEAD,
    EngineKind.STOCK,
    EngineKind.STOCK_NGRAM,
    EngineKind.STOCK_EAGLE3,
    EngineKind.STOCK_SUFFIX,
)
"""Engines that replay a text, in order; the first was used by the steps before. V1's replays come later."""
_WEIGHTS_SECONDS, _CONTEXT_SECONDS = 9e-3, 5e-8
"""Estimated seconds of a replay's step: of a model of 8 billion parameters, and of a token of context."""
_DRAFTERS_SECONDS = 30.0
"""Estimated seconds to build an instance's drafters: compilation for the host, and a sweep of step times."""


@dataclass(frozen=True, slots=True)
class GpuSubject:
    """Model, device and settings of a run.

    `model` is a folder, and `load_format` the format of its weights. `dtype` applies to the engines. `device` is
    "cuda" or "cpu". `graphs` applies to the engines that come first. `prefill` is the estimated prefill speed in
    tokens a second. `out` gets the results, `made` what is made for the engines. Replays take the shape of 8B
    parameters in `larger`, with random weights, in place of the model; None: they take the model.
    """

    model: Path
    load_format: str
    dtype: str
    device: str
    graphs: Graphs
    prefill: int
    out: Path
    sizes: GpuSizes
    made: Path
    larger: Path | None = None


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
    for kind in _REPLAYED:
        if kind in kinds:
            steps += _replays(subject, kind)
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
    if EngineKind.V1 in kinds:
        steps += _replays(subject, EngineKind.V1)
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
        # A head fits one shape.
        subject.made / f"head-{subject.model.name}",
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
    """Yield an engine's memory, its token steps, and its first cells."""
    brief = kind in (EngineKind.V1, EngineKind.STOCK)
    if kind not in STOCK:
        setup = _setup(subject, kind)
        # Kernels that failed their check at the engine's start are among its figures, and change all others.
        yield GpuStep(f"memory: {kind}", setup, "memory", 1, brief=brief)
        yield from (replace(step, brief=brief) for step in _tokens(subject, setup))
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


def _replays(subject: GpuSubject, kind: EngineKind) -> Iterator[GpuStep]:
    """Yield the replays of an engine: as it is, and for ours with the drafts of an instance."""
    if subject.larger is not None:
        subject = replace(subject, model=subject.larger, load_format=LOAD_FORMAT, prefill=PREFILL["q8"])
    sizes, setup, built = subject.sizes.replay, _setup(subject, kind), False
    common: Arguments = {
        "samples": sizes.samples,
        "prompt": sizes.prompt,
        "repeats": sizes.repeats,
        "mode": sizes.mode,
        "sweep_seconds": sizes.sweep_seconds,
    }
    for tokens in sizes.tokens:
        ways: list[TextDrift | None] = [None]
        if kind not in STOCK:
            ways += sizes.drifts if tokens == min(sizes.tokens) else sizes.drifts[:1]
        context = 1.5 * sizes.prompt + tokens / 2
        decoding = tokens * (_WEIGHTS_SECONDS + _CONTEXT_SECONDS * sizes.samples * context)
        prefill = 1.5 * sizes.samples * sizes.prompt / subject.prefill
        for drift in ways:
            # Without its package an engine only says so.
            seconds = 0.1 if setup.absent else prefill + decoding / (1 if drift is None else 2)
            if drift is not None and not built:
                seconds, built = seconds + _DRAFTERS_SECONDS, True
            name = f"replay: {kind}, {sizes.samples} x {tokens}{'' if drift is None else f', {drift}'}"
            yield GpuStep(name, setup, "replay", seconds, {**common, "tokens": tokens, "drift": drift})


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
