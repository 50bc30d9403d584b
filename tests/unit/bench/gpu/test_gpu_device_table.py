"""The simulator's table of a device is fitted to the cells of a run there."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from bench.gpu.device_table import TimedStep, fitted, main, measured_steps
from bench.gpu.running import State
from bench.gpu.sizes import EngineKind, GpuCell, GpuSizes, Graphs
from services.simulator.device_tables import (
    H100,
    QWEN3_8B,
    decoding_table,
    devices,
    known_devices,
    read_device,
)

TABLE = decoding_table("8B H100", QWEN3_8B, H100)
SIZES = GpuSizes()


def measured(cell: GpuCell, noise: float, random: Random) -> dict[str, Any]:
    """Return a cell as measured on an engine whose step times follow the table of an H100, plus some noise."""
    runs = []
    for length, wrong in [(0, 0.0), *((draft.length, draft.wrong) for draft in SIZES.drafts)]:
        tokens = 1 + length * (1 - wrong)
        context = cell.rows * (cell.context + tokens * SIZES.steps / 2)
        seconds = TABLE.seconds(cell.rows, cell.rows * (1 + length), context)
        runs.append(
            {
                "drafts": length,
                "wrong": wrong,
                "steps": SIZES.steps,
                "tokens_a_step": tokens,
                "step_ms": 1e3 * seconds * random.uniform(1 - noise, 1 + noise),
            }
        )
    named = [EngineKind.V1.value, Graphs.FULL.value]
    return {"engine": named, "rows": cell.rows, "context": cell.context, "runs": runs}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run on such a device."""
    random = Random(1)
    state = State(tmp_path / "state.json", {"device": "NVIDIA H100", "model": "q8"})
    for cell in SIZES.cells:
        name = f"steps: V1, {cell.rows} x {cell.context}"
        fits = cell.rows * cell.context < TABLE.kv_tokens
        result = measured(cell, 0.02, random) if fits else {"engine": ["V1", "full"], "skipped": "no room"}
        state.done[name] = {"seconds": 1.0, "result": result}
    state.done["memory: V1"] = {"seconds": 1.0, "result": {"kv_tokens": TABLE.kv_tokens}}
    state.save()
    return tmp_path


def test_the_table_has_the_times_of_the_device(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--name", "mine"]) == 0
    assert "off in the median" in capsys.readouterr().out
    table = read_device(run / "device.json")
    assert (table.name, table.kv_tokens) == ("mine", TABLE.kv_tokens)
    assert table.source.startswith("measured: NVIDIA H100, V1, full graphs")
    assert table.per_context == pytest.approx(TABLE.per_context, rel=0.1)
    # Batches whose attention is bound by memory, as the fit has it: short drafts.
    for cell in SIZES.cells:
        if cell.rows * cell.context < TABLE.kv_tokens:
            expected = TABLE.seconds(cell.rows, cell.rows, cell.rows * cell.context)
            found = table.seconds(cell.rows, cell.rows, cell.rows * cell.context)
            assert found == pytest.approx(expected, rel=0.1), cell
    # Other numbers of rows than the measured ones, among them more.
    for samples, rows in ((200, 400), (128, 700), (256, 1500), (256, 2600), (1, 8192)):
        expected = TABLE.seconds(samples, rows, samples * 1024)
        assert table.seconds(samples, rows, samples * 1024) == pytest.approx(expected, rel=0.2), (
            samples,
            rows,
        )


def test_a_measured_table_is_a_device_by_name(run: Path) -> None:
    main([str(run), "--name", "8B mine", "--out", str(run / "mine.json")])
    measured_folder = run / "measured"
    measured_folder.mkdir()
    (run / "mine.json").rename(measured_folder / "mine.json")
    known = known_devices(measured_folder)
    assert [each.name for each in known] == [*(each.name for each in devices()), "8B mine"]
    assert {each.source for each in known[:-1]} == {"data sheet"}


def test_a_measured_table_replaces_the_data_sheet_of_its_name(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "measured"
    folder.mkdir()
    main([str(run), "--name", "8B H100", "--out", str(folder / "mine.json")])
    known = known_devices(folder)
    assert [each.name for each in known] == [each.name for each in devices()]
    (ours,) = (each for each in known if each.name == "8B H100")
    assert ours.source.startswith("measured: NVIDIA H100")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--kind", "V2"], "has no cells of V2 with full graphs"),
        (["--graphs", "default"], "has no cells of V1 with default graphs"),
    ],
)
def test_what_was_not_measured_makes_no_table(
    run: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), *options]) == 2
    assert said in capsys.readouterr().err
    assert main([str(run / "nowhere")]) == 2


def test_one_context_is_not_enough(run: Path) -> None:
    state = State.load(run / "state.json")
    assert state is not None
    steps = [step for step in measured_steps(state, EngineKind.V1, Graphs.FULL) if step.context < 8 * 2000]
    alone = [step for step in steps if step.samples == 8]
    with pytest.raises(ValueError, match="what a token of context adds is not known"):
        fitted([alone[0]])
    # Noise makes no step with more rows quicker, and no context negative.
    table = fitted([TimedStep(8, 8, 8e3, 5.0), TimedStep(8, 8, 3e4, 4.9), TimedStep(8, 40, 8e3, 4.8)])
    assert table.per_context == 0
    assert list(table.milliseconds) == sorted(table.milliseconds)
