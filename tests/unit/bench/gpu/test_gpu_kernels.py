"""Steps of the kernels on a GPU: wrong results are noticed, sweeps choose, and tables say what bounds a kernel."""

import json
from dataclasses import replace

import pytest
import torch

from bench.gpu.kernels import cases, engine_step, measure
from bench.gpu.kernels.measure import Taken
from bench.gpu.kernels.steps import TINY, KernelBench, kernel_steps
from bench.gpu.report import table
from bench.gpu.running import KERNELS
from kernels.backend import KernelMismatch, installed
from kernels.coupled_sampler.sample import sample
from kernels.draft_table import DraftTable
from kernels.tuning import Tuning, read, tuning

CPU = torch.device("cpu")
CEILINGS = {"bytes_per_second": 10_000.0, "flops": 1.0, "words_per_second": 500.0}
pytestmark = pytest.mark.skipif(not installed(), reason="Triton is not installed (extra: kernels)")


def step_of(name):
    return next(step for step in kernel_steps("cpu") if step.name == KERNELS + name)


def bench(tmp_path, *, ceilings=None, values=None, wrong=()):
    return KernelBench(CPU, tmp_path, ceilings, values or {}, wrong)


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


def test_parameters_with_which_a_result_was_wrong_are_not_written(tmp_path):
    write = step_of("tuned parameters")
    with pytest.raises(ValueError, match="nothing is written, for these failed: exact, tuned: masks"):
        write.run(bench(tmp_path, values={"scan_block": 64}, wrong=["exact, tuned: masks"]))
    assert not list(tmp_path.iterdir())
    found = write.run(bench(tmp_path, values={"scan_block": 64}))
    assert read(tmp_path / "cpu.json") == Tuning(scan_block=64)
    assert found["path"] == str(tmp_path / "cpu.json")


def test_a_table_needs_ceilings(tmp_path):
    with pytest.raises(LookupError, match="there are no ceilings"):
        step_of("defaults: sampler").run(bench(tmp_path))


def test_a_sweep_takes_the_fastest_over_all_runs_and_leaves_out_what_fails():
    times = {256: (4.0, 1.0), 512: (1.0, 3.0), 1024: (0.1, None), 2048: (3.0, 3.0)}

    def timed(which):
        found = times[tuning(CPU).scan_block][which]
        if found is None:
            raise RuntimeError("out of shared memory")
        return found

    sweep = measure.Sweep("scan_block", tuple(times), lambda *_: {}, 1)
    found = measure.swept(sweep, Tuning(), {"a": 0, "b": 1}, timed)
    assert found["best"] == 512
    assert "out of shared memory" in found["tried"][2]["error"]
    with pytest.raises(ValueError, match="no value of scan_block works: RuntimeError: out of shared memory"):
        measure.swept(replace(sweep, candidates=(1024,)), Tuning(), {"b": 1}, timed)


def test_a_row_has_its_share_of_whatever_bounds_it_and_rivals_may_fail():
    def absent():
        raise ModuleNotFoundError("flashinfer")

    makers = {"ours": lambda: 0.5, "torch": lambda: 1.0, "FlashInfer": absent}
    case = cases.Case("sampler", "2 rows", makers, moved=1000, flops=0, words=100)
    taken = lambda seconds: Taken(seconds, 0.25, in_graph=seconds < 1)  # noqa: E731
    rows = list(measure.measured(case, CEILINGS, taken))
    assert [row.get("of_bound") for row in rows] == [0.4, 0.2, None]
    assert rows[0]["bound_by"] == "noise"
    assert rows[1]["ours_is"] == 2
    assert json.loads(json.dumps(rows)) == rows
    printed = list(table(rows))
    assert printed[-1] == "- FlashInfer (2 rows): ModuleNotFoundError: flashinfer"
    assert "40%" in printed[2]
    # Launches are in the device's time of what could not be captured.
    assert "| 500000.0 | 250000.0 |" in printed[2]
    assert "| 1000000.0* | 250000.0 |" in printed[3]


def test_a_setting_that_ours_fails_in_is_a_failure_and_the_others_are_measured(tmp_path, monkeypatch):
    def fails():
        raise RuntimeError("out of shared memory")

    def made(device, sizes):
        yield cases.Case("sampler", "wide", {"ours": fails, "torch": lambda: int}, 1)
        yield cases.Case("sampler", "narrow", {"ours": lambda: int, "torch": lambda: int}, 1)

    monkeypatch.setitem(cases.CASES, "sampler", made)
    found = step_of("defaults: sampler").run(bench(tmp_path, ceilings=CEILINGS))
    assert found["failed"] == {"sampler, wide": "RuntimeError: out of shared memory"}
    assert [row["by"] for row in found["rows"] if "seconds" in row] == ["torch", "ours", "torch"]
