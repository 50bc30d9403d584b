"""First minutes on a GPU, on tiny shapes on the CPU: every part runs, in calls that go on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from bench.gpu import report, running
from bench.gpu.device import KernelSetup
from bench.gpu.engines.setup import LOAD_FORMAT, EngineSetup, model_folder
from bench.gpu.kernels.engine_step import WITHOUT_DEVICE
from bench.gpu.kernels.measure import SWEEPS
from bench.gpu.plan import GpuSubject, plan
from bench.gpu.report import differences
from bench.gpu.running import (
    DONE,
    LINES,
    MORE,
    SWEEP,
    TUNED_CHECKS,
    GpuStep,
    SpawnedWorker,
    State,
    Worker,
    WorkerHost,
    build_orders,
    left,
    run,
)
from bench.gpu.sizes import TINY, EngineKind, Graphs
from bench.worker import serve
from kernels.tuning import Tuning, read
from tests.support.engine_process import EngineProcess

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[3]
SHORT = tuple(kind for kind in TINY.kinds if kind not in (EngineKind.AHEAD, EngineKind.STOCK_NGRAM))
"""Engines that start soon: V2 imports vLLM anew, and vLLM compiles its n-gram drafter."""
REPEATED = tuple(TUNED_CHECKS + name for name in ("noise", "masks", "attention", "the engine"))
"""Steps that do what others do, with parameters that were swept: one of the kind is left, that of near ties."""


def started(setup: Any) -> Worker:
    """Start a process: one of kernels imports Triton anew, the others have vLLM imported already."""
    if not isinstance(setup, KernelSetup):
        return EngineProcess(serve, build_orders, (setup,), v2=isinstance(setup, EngineSetup) and setup.on_v2)
    # It sets this itself; here it is to be known when Python starts.
    with patch.dict(os.environ, TRITON_INTERPRET="1"):
        return SpawnedWorker(setup)


@pytest.fixture
def quick_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes that interpret kernels do so as quickly as those of the kernels' own tests."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('TRITON_INTERPRET') == '1':\n"
        "    from tests.support.triton_interpreter import make_quicker\n"
        "    make_quicker()\n"
    )
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), str(ROOT), before))))


def call(steps: Sequence[GpuStep], path: Path, seconds: float) -> int:
    with WorkerHost(started) as host:
        until = time.monotonic() + seconds
        return run(steps, host, path, until, "tiny", lambda state: report.write(state, steps))


def together(steps: Sequence[GpuStep]) -> list[GpuStep]:
    """Return the steps with all of a process in a row, so that it is started once."""
    setups = [step.setup for step in steps]
    return sorted(steps, key=lambda step: setups.index(step.setup))


@pytest.mark.usefixtures("quick_interpreter")
@pytest.mark.parametrize(
    ("kinds", "repeated"),
    [(SHORT, REPEATED), pytest.param(TINY.kinds, (), marks=pytest.mark.soak)],
    ids=["short", "all"],
)
def test_every_step_runs_and_a_call_goes_on_where_the_last_one_ended(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kinds: tuple[EngineKind, ...],
    repeated: tuple[str, ...],
) -> None:
    # The step that is under way when a call's time is over may take as long as the machine needs.
    monkeypatch.setattr(running, "GRACE_SECONDS", 600)
    out = tmp_path / "run"
    folder, load_format = model_folder("tiny", tmp_path / "tiny")
    assert load_format == LOAD_FORMAT
    sizes = replace(TINY, kinds=kinds)
    subject = GpuSubject(folder, load_format, "float32", "cpu", Graphs.NONE, 10_000, out, sizes, tmp_path)
    steps, path = together(plan(subject)), out / "state.json"
    assert call(steps, path, 0) == MORE
    first = State.load(path)
    assert first is not None
    # One step is done however short a call is.
    assert [*first.done] == [steps[0].name, steps[1].name]
    assert "call again" in capfd.readouterr().out
    # As if an earlier call had done them.
    before = [step.name for step in steps if step.name.startswith(repeated)] if repeated else []
    first.done |= {name: {"seconds": 7.0, "result": {"by": "another call"}} for name in before}
    first.save()
    assert call(steps, path, 3600) == DONE
    said = capfd.readouterr().out
    assert [step.name for step in steps if f"] {step.name} ...\n" not in said] == [
        steps[0].name,
        steps[1].name,
        *before,
    ]
    assert "about 0 s left" in said
    state = State.load(path)
    assert state is not None
    assert not state.failed
    assert set(state.done) == {step.name for step in steps}
    assert left(state, steps) == 0
    assert len((out / LINES).read_text().splitlines()) == len(steps) - len(before)
    _check_engines(state, kinds)
    _check_replays(state, kinds)
    _check_kernels(state, out)
    # Configs and heads are not among the results.
    files = ["gpu.json", "report.md", LINES, "state.json", "tuned"]
    assert sorted(path.name for path in out.iterdir()) == files
    tables = json.loads((out / report.FIGURES).read_text())["tables"]
    assert all(tables[name]["rows"] for name in ("tokens", "plain", "drafts", "replays", "passes"))
    text = (out / "report.md").read_text()
    for heading in (
        "Tokens: samples", "Plain decoding", "Drafts: ms", "Replays: the same", "Draft models", "A step's waits",
        "Attention by", "Memory: ", "Kernels, tuned", "Kernels, defaults", "Sweeps", "Engine step: nothing waits",
        "vLLM's libraries",
    ):  # fmt: skip
        assert f"## {heading}" in text


def _check_engines(state: State, kinds: Sequence[EngineKind]) -> None:
    runs = {name: each["result"] for name, each in state.done.items() if name.startswith("tokens: ")}
    drafting = {EngineKind.V1, EngineKind.AHEAD, EngineKind.TREES} & set(kinds)
    assert {name.split(",")[0] for name in runs} == {f"tokens: {kind}" for kind in drafting}
    truth = next(iter(runs.values()))["tokens"]
    for name, found in runs.items():
        assert differences(truth, found["tokens"]) == (TINY.exact * TINY.tokens, 0, -1), name
        assert (found["accepted"] > 0) == name.endswith(("drafts", "trees"))
    # Weights are no constant, and logits not flat.
    assert len({token for tokens in truth.values() for token in tokens}) > TINY.tokens
    assert f"tokens: {EngineKind.TREES}, float32, trees" in runs
    for kind in {EngineKind.STOCK, EngineKind.STOCK_EAGLE3, EngineKind.V1, EngineKind.AHEAD} & set(kinds):
        (plain, *drafted) = state.done[f"steps: {kind}, 2 x 12"]["result"]["runs"]
        assert plain["step_ms"] > 0
        assert plain["idle_ms"] > 0
        # The first outcome may be of a step that was scheduled before the watch began.
        assert plain["graphs"]["NONE"] >= plain["steps"] - 1 > 0
        assert all(run["tokens_a_step"] > plain["tokens_a_step"] for run in drafted)
    for kind in (EngineKind.EAGLE3, EngineKind.QUANTIZED):
        passes = state.done[f"draft passes: {kind}"]["result"]["passes"]
        assert [(each["rows"], each["tokens"]) for each in passes] == [(1, 1), (1, 8), (2, 1), (2, 8)]
        assert all(each["ms"] > 0 for each in passes)


def _check_replays(state: State, kinds: Sequence[EngineKind]) -> None:
    """Every engine has sampled the text's tokens, or its step would have failed."""
    found = {name: each["result"] for name, each in state.done.items() if name.startswith("replay: ")}
    sizes = TINY.replay
    batch = f"{sizes.samples} x {max(sizes.tokens)}"
    skipped = {name: result["skipped"] for name, result in found.items() if "skipped" in result}
    assert skipped == {
        f"replay: {EngineKind.STOCK_SUFFIX}, {batch}": "needs arctic-inference, which is not installed"
    }
    for kind in set(kinds) & {EngineKind.STOCK, EngineKind.STOCK_EAGLE3, EngineKind.V1, EngineKind.AHEAD}:
        plain = found[f"replay: {kind}, {batch}"]
        assert plain["seconds"] > plain["prefill_seconds"] > 0
        # A random head may be right by chance.
        assert plain["tokens_a_step"] == 1 or kind is EngineKind.STOCK_EAGLE3
        assert plain["drafted"] == 0
    for kind in {EngineKind.V1, EngineKind.AHEAD} & set(kinds):
        drafted = found[f"replay: {kind}, {batch}, {sizes.drifts[0]}"]
        # References are right but for the places at which they leave the text.
        assert drafted["drafted"] >= drafted["accepted"] > sizes.samples * max(sizes.tokens) / 4
        assert drafted["tokens_a_step"] > 1.5
        assert drafted["decision_ms"] > 0


def _check_kernels(state: State, out: Path) -> None:
    best = {sweep.parameter: state.done[f"{SWEEP}{sweep.parameter}"]["result"]["best"] for sweep in SWEEPS}
    assert read(out / "tuned" / "cpu.json") == replace(Tuning(), **best)
    graph = state.done["kernels: engine step: in a graph"]["result"]
    assert graph["replays"] == 3
    assert graph["accepted drafts"] > 0
    assert graph["not measured"] == WITHOUT_DEVICE
