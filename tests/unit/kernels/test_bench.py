"""The kernels' benchmark: every case can be set up and run, and without a GPU nothing is claimed."""

import torch

from kernels import bench, bench_rivals
from kernels.bench_cases import CASES, Sizes

SMALL = Sizes(
    requests=3, context=64, drafted=1, heads=4, kv_heads=2, head_size=16, rows=2, vocabulary=300, outputs=48,
    inputs=128, layers=2, blocks=9, packed_tokens=70, tokens=4,
)  # fmt: skip


def once(run):
    run()
    return 0.5


def test_without_a_device_the_status_says_so_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["--out", str(tmp_path / "kernels.json")]) == bench.NO_DEVICE
    assert "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_every_case_runs_and_has_its_share_of_the_roofline(monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(bench_rivals, "import_module", absent)
    ceilings = {"bytes_per_second": 1e6, "flops": 1e9}
    rows = [
        row
        for cases in CASES.values()
        for case in cases(torch.device("cpu"), SMALL)
        for row in bench.measured(case, ceilings, once)
    ]
    ours = [row for row in rows if row["by"].startswith("ours")]
    assert {row["kernel"] for row in ours} == {
        "attention",
        "sampler",
        "quantise",
        "w4a16",
        "kv_pack",
        "kd_loss",
    }
    rivals = {row["by"] for row in rows if "error" in row}
    assert rivals == {"FlashInfer", "vLLM FlashAttention", "vLLM Triton", "vLLM Marlin"}
    for row in ours:
        slower = max(row["bytes_per_second"] / 1e6, row["flops"] / 1e9)
        assert row["of_roofline"] == slower
    printed = bench.table(rows, ceilings, "a device")
    assert len(printed.splitlines()) == 2 + len(rows) + sum("error" in row for row in rows)
