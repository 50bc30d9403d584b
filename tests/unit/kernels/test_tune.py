"""The first hour on a GPU, on tiny shapes in Triton's interpreter: every step runs, in slices that go on."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels import backend
from kernels.backend import Backend, KernelMismatch, installed
from kernels.coupled_sampler.sample import sample
from kernels.draft_table import DraftTable
from kernels.tune import __main__ as tune_main
from kernels.tune import cases, engine_step, measure, report, sweeps
from kernels.tune.__main__ import NO_DEVICE, main, supervise
from kernels.tune.plan import TINY, Bench, Step, steps
from kernels.tune.state import OtherRun, State
from kernels.tune.worker import run, work
from kernels.tuning import Tuning, read, tuning

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not installed(), reason="Triton is not installed (extra: kernels)")


REPEATED = (
    "exact, tuned: noise",
    "exact, tuned: masks",
    "exact, tuned: attention",
    "exact, tuned: the engine",
)
"""Steps that do what others do, with parameters that were swept: one of the kind is left, that of near ties."""


@pytest.fixture
def call(tmp_path, monkeypatch, capfd):
    """Run the program; its workers are where there is neither numba nor vLLM nor pytest."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor name in ('numba', 'vllm', 'pytest', 'hypothesis'): sys.modules[name] = None\n"
        "from tests.support.triton_interpreter import make_quicker\nmake_quicker()\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    # The program sets it for its workers; here it is to be unset again.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.chdir(ROOT)

    def run(*arguments):
        status = main(["--device", "cpu", "--out", str(tmp_path), *arguments])
        said = capfd.readouterr()
        return status, said.out, said.err

    return run


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "repeated", [REPEATED, pytest.param((), marks=pytest.mark.soak)], ids=["short", "all"]
)
def test_every_step_runs_and_a_call_goes_on_where_the_last_one_ended(repeated, call, tmp_path, monkeypatch):
    def supervise_here(path, command, until, limit):
        return work(CPU, path, tmp_path / "cpu.json", until)

    with monkeypatch.context() as patched:
        patched.setattr(backend, "_chosen", Backend.AUTO)
        patched.setattr(tune_main, "supervise", supervise_here)
        status, said, errors = call("--seconds", "0")
    assert status == 3, said + errors
    assert "slice over before 'exact: noise'" in said
    # As if an earlier call had done them.
    plan = [step.name for step in steps(CPU)]
    before = ["exact: noise", *(name for name in plan if name.startswith(repeated))]
    assert len(before) == 1 + len(repeated)
    state = State.load(tmp_path / "state.json")
    state.done |= {name: {"seconds": 7.0, "result": {"by": "another call"}} for name in before}
    state.save()
    status, said, errors = call("--seconds", "10000")
    assert status == 0, said + errors
    assert [name for name in plan if f"] {name} ...\n" not in said] == sorted(before, key=plan.index)
    assert "about 0 s left" in said
    state = State.load(tmp_path / "state.json")
    assert all(state.done[name]["result"] == {"by": "another call"} for name in before)
    assert not state.failed
    assert set(state.done) == set(plan)
    best = {
        sweep.parameter: state.done[f"sweep: {sweep.parameter}"]["result"]["best"] for sweep in sweeps.SWEEPS
    }
    assert read(tmp_path / "cpu.json") == replace(Tuning(), **best)
    graph = state.done["engine step: in a graph"]["result"]
    assert graph["replays"] == 3
    assert graph["accepted drafts"] > 0
    assert graph["not measured"] == engine_step.WITHOUT_DEVICE
    text = (tmp_path / "report.md").read_text()
    for heading in (
        "## Engine step: nothing waits",
        "## Failed (0)",
        "## Times, tuned",
        "## Times, defaults",
        "## Sweeps",
    ):
        assert heading in text
    assert all(kernel in text for kernel in ("attention", "sampler", "quantise", "kv_pack", "kd_loss"))


@pytest.mark.parametrize("wrong", ["drafts", "tokens"])
def test_a_step_whose_kernels_are_wrong_is_noticed(wrong, monkeypatch):
    """Without the interpreter, which pytest's process may not have: the sampler is the reference."""

    def sampled(logits, vectors, parts, out, domain):
        ids, cu = vectors["seeds"], vectors["first_rows"]
        found = sample(logits, ids, vectors["positions"], vectors["temperature"], vectors["drafts"], cu)
        for name, part in out.items():
            part.copy_(getattr(found, name))
        if wrong == "tokens":
            out["tokens"][0] += 1

    monkeypatch.setattr("kernels.coupled_sampler.triton_sample.sample_triton", sampled)
    gather = DraftTable.gather
    if wrong == "drafts":
        monkeypatch.setattr(DraftTable, "gather", lambda self, slots, at, k: gather(self, slots, at + 1, k))
    with pytest.raises(KernelMismatch, match="emitted" if wrong == "drafts" else "1 of . tokens are wrong"):
        engine_step.replayed(CPU, TINY)


def test_without_a_device_the_status_says_so_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--out", str(tmp_path)]) == NO_DEVICE
    assert "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_run_on_another_machine_is_not_gone_on_with(tmp_path):
    State.resume(tmp_path / "state.json", {"device": "one", "torch": "2"}).save()
    with pytest.raises(OtherRun, match=r"another device \('one', not 'two'\)"):
        State.resume(tmp_path / "state.json", {"device": "two", "torch": "2"})


WORKER = """
import os, sys, threading
from pathlib import Path
from kernels.tune.state import State
state = State.load(Path(sys.argv[1]))
if not state.over("a"):
    state.begin("a")
    {end}
state.begin("b")
state.finish("b", {{}}, None)
sys.exit(1)
"""


# As if it had begun long ago, so that the limit is one that no other step reaches.
HANGS = "state.running = ('a', 0.0); state.save(); threading.Event().wait()"


@pytest.mark.parametrize("end", ["os._exit(9)", HANGS], ids=["dies", "hangs"])
def test_a_step_that_ends_its_worker_or_hangs_has_failed_and_the_rest_is_done(end, tmp_path):
    path = tmp_path / "state.json"
    State(path, {}).save()
    command = [sys.executable, "-c", WORKER.format(end=end), str(path)]
    assert supervise(path, command, time.time() + 600, 600) == 1
    state = State.load(path)
    assert "ended its process, or was ended" in state.failed["a"]
    assert "b" in state.done


def test_a_step_that_outlives_its_slice_is_done_again_by_the_next(tmp_path):
    path = tmp_path / "state.json"
    State(path, {}).save()
    command = [sys.executable, "-c", WORKER.format(end="threading.Event().wait()"), str(path)]
    state = State.load(path)
    state.begin("a")
    assert supervise(path, command, time.time() - 600, 600) == 3
    state = State.load(path)
    assert (state.running, state.failed, state.done) == (None, {}, {})


def test_a_worker_that_breaks_between_steps_is_not_started_again(tmp_path):
    path = tmp_path / "state.json"
    State(path, {}).save()
    assert supervise(path, [sys.executable, "-c", "raise SystemExit(7)"], time.time() + 600, 600) == 7


def bench(tmp_path, **fields):
    return Bench(
        CPU, State(tmp_path / "state.json", {"device": "a device"}, **fields), tmp_path / "tuned.json"
    )


def test_a_step_that_raises_is_reported_and_spoils_no_other(tmp_path):
    def fails(_):
        raise KernelMismatch("3 of 4 tokens are wrong")

    made = bench(tmp_path)
    assert run(Step("exact: tokens", 1, fails), made)
    assert run(Step("other", 1, lambda _: {"fine": 1}), made)
    assert made.state.failed == {"exact: tokens": "KernelMismatch: 3 of 4 tokens are wrong"}
    assert made.state.done["other"]["result"] == {"fine": 1}
    assert "- exact: tokens: KernelMismatch: 3 of 4 tokens are wrong" in (tmp_path / "report.md").read_text()


def test_parameters_with_which_a_result_was_wrong_are_not_written(tmp_path):
    write = next(step for step in steps(CPU) if step.name == "tuned parameters")
    checks = [step.name for step in steps(CPU) if step.name.startswith("exact, tuned: ")]
    done = {name: {"seconds": 1.0, "result": {}} for name in checks}
    wrong = bench(tmp_path, done={k: v for k, v in done.items() if k != checks[1]}, values={"scan_block": 64})
    assert run(write, wrong)
    assert f"nothing is written, for these failed: {checks[1]}" in wrong.state.failed["tuned parameters"]
    assert not wrong.tuned.exists()
    right = bench(tmp_path, done=dict(done), values={"scan_block": 64})
    assert run(write, right)
    assert read(right.tuned) == Tuning(scan_block=64)


def test_a_sweep_takes_the_fastest_over_all_runs_and_leaves_out_what_fails():
    times = {256: (4.0, 1.0), 512: (1.0, 3.0), 1024: (0.1, None), 2048: (3.0, 3.0)}

    def timed(which):
        found = times[tuning(CPU).scan_block][which]
        if found is None:
            raise RuntimeError("out of shared memory")
        return found

    sweep = sweeps.Sweep("scan_block", tuple(times), lambda *_: {}, 1)
    found = sweeps.swept(sweep, Tuning(), {"a": 0, "b": 1}, timed)
    assert found["best"] == 512
    assert "out of shared memory" in found["tried"][2]["error"]
    with pytest.raises(ValueError, match="no value of scan_block works: RuntimeError: out of shared memory"):
        sweeps.swept(replace(sweep, candidates=(1024,)), Tuning(), {"b": 1}, timed)


def test_a_row_has_its_share_of_whatever_bounds_it_and_rivals_may_fail():
    def absent():
        raise ModuleNotFoundError("flashinfer")

    makers = {"ours": lambda: 0.5, "torch": lambda: 1.0, "FlashInfer": absent}
    case = cases.Case("sampler", "2 rows", makers, moved=1000, flops=0, words=100)
    ceilings = {"bytes_per_second": 10_000.0, "flops": 1.0, "words_per_second": 500.0}
    rows = list(measure.measured(case, ceilings, lambda seconds: seconds))
    assert [row.get("of_bound") for row in rows] == [0.4, 0.2, None]
    assert rows[0]["bound_by"] == "noise"
    assert rows[1]["ours_is"] == 2
    assert json.loads(json.dumps(rows)) == rows
    printed = list(report.table(rows))
    assert printed[-1] == "- FlashInfer (2 rows): ModuleNotFoundError: flashinfer"
    assert "40%" in printed[2]


def test_a_setting_that_ours_fails_in_is_a_failure_and_the_others_are_measured(tmp_path, monkeypatch):
    def fails():
        raise RuntimeError("out of shared memory")

    def made(device, sizes):
        yield cases.Case("sampler", "wide", {"ours": fails, "torch": lambda: int}, 1)
        yield cases.Case("sampler", "narrow", {"ours": lambda: int, "torch": lambda: int}, 1)

    monkeypatch.setitem(cases.CASES, "sampler", made)
    ceilings = {"seconds": 1.0, "result": {"bytes_per_second": 1.0, "flops": 1.0, "words_per_second": 1.0}}
    tried = bench(tmp_path, done={"ceilings": ceilings})
    assert run(next(step for step in steps(CPU) if step.name == "tuned: sampler"), tried)
    assert tried.state.failed == {"sampler, wide": "RuntimeError: out of shared memory"}
    assert [row["by"] for row in tried.state.done["tuned: sampler"]["result"]["rows"] if "seconds" in row] == [
        "torch", "ours", "torch",
    ]  # fmt: skip
