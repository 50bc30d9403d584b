"""First minutes of the engines on a GPU, on a tiny model on the CPU: every step runs, in slices that go on."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from bench.engine_cuda.__main__ import DONE, MORE, NO_DEVICE, TINY, main, run_slice
from bench.engine_cuda.host import WorkerHost, serve
from bench.engine_cuda.kinds import CudaSizes, EngineKind, EngineSetup
from bench.engine_cuda.plan import left, steps
from bench.engine_cuda.report import differences
from kernels.tune.state import State
from tests.support.engine_process import EngineProcess
from tests.support.models import tiny_model

pytestmark = pytest.mark.timeout(400)

SHORT = (EngineKind.STOCK, EngineKind.V1, EngineKind.TREES)
"""Engines that one process of vLLM can be: V2 takes another, which imports vLLM anew."""


def forked(setup: EngineSetup, sizes: CudaSizes) -> EngineProcess:
    """A process that has vLLM imported already."""
    return EngineProcess(serve, setup, sizes, v2=setup.on_v2)


@pytest.mark.parametrize(
    "kinds", [SHORT, pytest.param(TINY.kinds, marks=pytest.mark.soak)], ids=["V1", "all kinds"]
)
def test_every_step_runs_and_a_call_goes_on_where_the_last_one_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], kinds: tuple[EngineKind, ...]
) -> None:
    sizes = replace(TINY, kinds=kinds)
    model, path = tiny_model(tmp_path / "model"), tmp_path / "run" / "state.json"
    plan = steps(model, "float32", sizes)
    with WorkerHost(sizes, forked) as host:
        assert run_slice(plan, host, path, time.monotonic() - 30, "tiny") == MORE
    first = State.load(path)
    assert first is not None
    # One step is done however short a slice is.
    assert [*first.done] == [plan[0].name, plan[1].name]
    assert "call again" in capfd.readouterr().out
    with WorkerHost(sizes, forked) as host:
        assert run_slice(plan, host, path, time.monotonic() + 3600, "tiny") == DONE
        assert run_slice(plan, host, path, time.monotonic() + 3600, "another") == NO_DEVICE
    said = capfd.readouterr().out
    assert f"{plan[1].name} ..." not in said
    assert "about 0 s left" in said
    state = State.load(path)
    assert state is not None
    assert not state.failed
    assert left(state, plan) == 0
    runs = {name: each["result"] for name, each in state.done.items() if name.startswith("tokens: ")}
    assert {name.split(",")[0] for name in runs} == {
        f"tokens: {kind}" for kind in kinds if kind is not EngineKind.STOCK
    }
    truth = next(iter(runs.values()))["tokens"]
    for name, run in runs.items():
        assert differences(truth, run["tokens"]) == (TINY.exact * TINY.tokens, 0, -1), name
        assert (run["accepted"] > 0) == name.endswith(("drafts", "trees"))
    assert f"tokens: {EngineKind.TREES}, float32, trees" in runs
    for kind in set(kinds) - {EngineKind.TREES}:
        (plain, *drafted) = state.done[f"steps: {kind}, 2 x 12"]["result"]["runs"]
        assert plain["step_ms"] > 0
        assert plain["idle_ms"] > 0
        # The first outcome may be of a step that was scheduled before the watch began.
        assert plain["graphs"]["NONE"] >= plain["steps"] - 1 > 0
        assert all(run["tokens_a_step"] > plain["tokens_a_step"] for run in drafted)
    report = (path.parent / "report.md").read_text()
    for heading in (
        "Tokens",
        "Plain decoding",
        "Drafts",
        "A step's waits",
        "Attention",
        "Sampling",
        "Memory",
    ):
        assert f"## {heading}" in report


def test_without_a_device_the_status_says_so_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path / "run")]) == NO_DEVICE
    assert "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
