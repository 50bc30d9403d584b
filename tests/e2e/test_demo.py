"""The demo and the command line.

One `paceline up` is started as a user starts it, each process importing what it needs. The others have their
processes forked from where that is imported; `make soak` starts them as a user does, too.
"""

from __future__ import annotations

import functools
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from examples.tinymath import demo
from paceline.cli.app import run as command
from services.local import Platform, up
from tests.support.zygote import launch

ROOT = Path(__file__).parents[2]
TINYMATH = ROOT / "examples" / "tinymath" / "model"
SERVICES = {"bubbles", "drafts", "gateway", "policy", "reallocator", "valkey-server"}

# Processes that import what they need by themselves take long on a busy machine.
pytestmark = pytest.mark.timeout(900)


def _demo_here(flags: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "Platform", functools.partial(Platform, launch=launch))
        assert command(["demo", *flags]) == 0


def _demo_alone(flags: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "demo", *flags], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not (TINYMATH / "model.safetensors").exists(), reason="the tinymath model is not there")
@pytest.mark.parametrize(
    ("run", "samples", "tokens"),
    [(_demo_here, 4, 100), pytest.param(_demo_alone, 8, 200, marks=pytest.mark.soak)],
    ids=["here", "alone"],
)
def test_the_demo_writes_its_summary_and_report(
    tmp_path: Path, run: Callable[[list[str]], None], samples: int, tokens: int
) -> None:
    out = tmp_path / "runs" / "small"
    flags = [
        "--instances=1",
        "--steps=2",
        "--prompts=2",
        f"--samples={samples}",
        f"--max-tokens={tokens}",
        "--policy=toggle",
    ]
    small = "--instance-option=--kv-cache-memory-bytes=134217728"
    run([*flags, small, "--learner", f"--out={out}"])
    summary = json.loads((tmp_path / "runs" / "latest" / "summary.json").read_text())
    assert (summary["steps"], summary["samples"]) == (2, 2 * 2 * samples)
    assert len(summary["rollout_seconds"]) == 2
    assert 0 <= summary["reward_first"] <= 1
    assert summary["tokens"] > 2 * 2 * samples
    assert summary["plainly"]["differing"] == 0
    assert summary["plainly"]["tokens"] > 2 * samples
    assert summary["plainly"]["plain_seconds"] > 0
    report = Path(summary["report"]).read_text()
    assert summary["drafter_versions"][-1] >= 1
    entries = [json.loads(line) for line in (out / "report.jsonl").read_text().splitlines()]
    steps = [each["details"] for each in entries if each["kind"] == "speculation"]
    assert {(each["step"], each["mode"]) for each in steps} == {(0, "toggle"), (1, "toggle")}
    assert [each["details"]["step"] for each in entries if each["kind"] == "reward"] == [0, 1]
    for section in ("Reward", "Where the time goes", "Timeline of instances", "Critical path"):
        assert f">{section}</h2>" in report
    assert "mode unset -&gt; toggle" in report
    assert "engine steps verified drafts" in report
    assert "http://" not in report.replace("http://www.w3.org", ""), "the report fetches nothing"
    weights = sorted(path.name for path in (out / "weights").iterdir())
    assert weights == ["v00000001", "v00000002"]


HOST = """
import sys
from pathlib import Path
from services.local import PlatformConfig
from services.local.up import run_until_stopped
sys.exit(run_until_stopped(PlatformConfig(model=Path(sys.argv[1]), folder=Path(sys.argv[2]), instances=0)))
"""
"""What `paceline up` runs, without instances: importing what they need takes longer than all else."""


def _up(model: Path, folder: Path) -> list[str]:
    up_there = ["-m", "paceline", "up", "--model", str(model), "--folder", str(folder)]
    return [*up_there, "--instances=1", "--port=0", "--", "--kv-cache-memory-bytes=134217728"]


def _read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError("".join(lines))


def _ends(command: list[str], number: signal.Signals, names: set[str]) -> None:
    """Assert that the processes of these names run, and that a signal to their launcher ends all of them."""
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    said = _read_until(process, "Ctrl-C to stop")
    assert ("instance-0" in said) == ("generation" in names)
    started = psutil.Process(process.pid).children(recursive=True)
    assert {each.name() for each in started} >= names
    process.send_signal(number)
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive
    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 0)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        *(pytest.param(each, marks=pytest.mark.soak) for each in (signal.SIGTERM, signal.SIGKILL)),
    ],
)
def test_up_leaves_no_process_behind(model: Path, tmp_path: Path, number: signal.Signals) -> None:
    _ends(_up(model, tmp_path), number, SERVICES | {"generation"})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_other_signals_leave_no_process_behind(model: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Without instances, which are forked in the same way as the others."""
    _ends(["-c", HOST, str(model), str(tmp_path)], number, SERVICES)


def test_up_says_why_an_instance_does_not_start(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, whose instances have their modules imported already."""
    monkeypatch.setattr(up, "Platform", functools.partial(Platform, launch=launch))
    flags = ["--model", str(model), "--folder", str(tmp_path), "--instances=1", "--port=0"]
    before = signal.getsignal(signal.SIGTERM)
    try:
        done = CliRunner().invoke(up.app, [*flags, "--", "--dtype=float7"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done.exit_code == 1, done.output
    assert "float7" in done.output
    assert re.search(r"instance-\d\.log", done.output)
