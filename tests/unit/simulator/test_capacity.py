"""Instances for a deadline, and the command that says so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.simulator.capacity import SimulationProgress, instances_for, last_step
from services.simulator.command import app
from services.simulator.device_tables import H100, QWEN3_8B, decoding_table
from services.simulator.simulation_setup import (
    LogNormalLengths,
    SimulatedWorkload,
    SimulationSetup,
    read_trace,
)

SETUP = SimulationSetup(
    decoding_table("8B H100", QWEN3_8B, H100), 1, SimulatedWorkload(LogNormalLengths(300, 0.5, 1000), 50, 8)
)


def test_the_answer_meets_the_deadline_and_one_instance_fewer_does_not() -> None:
    longest, shortest = (last_step(replace(SETUP, instances=each)).seconds for each in (1, 64))
    deadline = (longest * shortest) ** 0.5
    answer = instances_for(SETUP, deadline, least=1, most=64)
    assert answer.instances is not None
    assert answer.tried[answer.instances].seconds <= deadline
    assert last_step(replace(SETUP, instances=answer.instances - 1)).seconds > deadline


def test_no_number_of_instances_is_sooner_than_the_longest_sample() -> None:
    answer = instances_for(SETUP, 0.1, least=1, most=64)
    assert answer.instances is None
    assert set(answer.tried) == {64}


@pytest.mark.parametrize(("least", "most", "deadline"), [(0, 4, 1.0), (5, 4, 1.0), (1, 4, 0.0)])
def test_what_cannot_be_asked_is_refused(least: int, most: int, deadline: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        instances_for(SETUP, deadline, least, most)


def test_the_command_prints_json() -> None:
    done = CliRunner().invoke(app, ["--instances", "2", "--prompts", "4", "--median", "100", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)[0]["samples"] == 64
    done = CliRunner().invoke(
        app, ["--prompts", "4", "--deadline", "1e6", "--least", "1", "--most", "2", "--json"]
    )
    assert json.loads(done.output)["instances"] == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "H9000"], "H9000"),
        (["--draft", "suffix"], "suffix"),
        (["--draft", "suffix=1.5"], "suffix=1.5"),
        (["--trace", "/nowhere.jsonl"], "nowhere"),
        (["--mode", "no"], "mode"),
        (["--deadline", "-1"], "deadline"),
        (["--pregenerate", "0.9", "--update-seconds", "nan"], "update-seconds"),
    ],
)
def test_the_command_names_an_option_that_cannot_be_used(options: list[str], said: str) -> None:
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 2
    assert said in done.output


def test_a_missed_deadline_is_an_exit_status() -> None:
    done = CliRunner().invoke(app, ["--prompts", "2", "--deadline", "0.01", "--most", "8"])
    assert done.exit_code == 3
    assert "do not meet" in done.output


def test_lengths_come_from_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text("[5, 7]\n\n[900]\n")
    drawn = SimulatedWorkload(read_trace(path), 40, 2).drawn(1, 0)[0][0]
    assert set(drawn.ravel().tolist()) == {5, 7, 900}
    for line in ("[0]", "{}", "[1.5]", "x", "[]"):
        path.write_text(f"[1]\n{line}\n")
        with pytest.raises(ValueError, match="line 2"):
            read_trace(path)


def test_step_times_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    known = {"kv_tokens": 10_000, "rows": [1, 8], "milliseconds": [10.0, 10.0]}
    path.write_text(json.dumps(known))
    options = ["--table", str(path), "--prompts", "1", "--samples", "1", "--median", "50.5", "--json"]
    done = CliRunner().invoke(app, [*options, "--spread", "0"])
    assert done.exit_code == 0, done.output
    # 50 whole tokens, and the prefill of the prompt in one step of the largest size.
    assert json.loads(done.output)[0]["seconds"] == pytest.approx(0.51)
    for wrong, said in (
        ({"rows": [8, 1]}, "rows"),
        ({"milliseconds": [10.0]}, "milliseconds"),
        ({"milliseconds": [10.0, 9.0]}, "milliseconds"),
        ({"kv_tokens": 0}, "kv_tokens"),
        ({"flops": 1}, "flops"),
    ):
        path.write_text(json.dumps(known | wrong))
        done = CliRunner().invoke(app, options)
        assert done.exit_code == 2
        assert said in done.output


def test_progress_says_what_is_left_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    progress = SimulationProgress(300, lambda: now)
    for now in (9.0, 10.0, 15.0, 20.0):  # noqa: B007
        progress(50, 0)
    assert capsys.readouterr().err.splitlines() == [
        "100 samples simulated in 10 s, about 20 s left",
        "200 samples simulated in 20 s, about 10 s left",
    ]
