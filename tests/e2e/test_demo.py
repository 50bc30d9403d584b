"""The demo and the command line, as a user starts them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
TINYMATH = ROOT / "examples" / "tinymath" / "model"

# Every process imports what it needs by itself here.
pytestmark = pytest.mark.timeout(900)


@pytest.mark.skipif(not (TINYMATH / "model.safetensors").exists(), reason="the tinymath model is not there")
def test_the_demo_writes_its_summary_and_report(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "small"
    flags = ["--steps=2", "--prompts=4", "--samples=4", "--max-tokens=200", "--policy=toggle"]
    flags += ["--learner", f"--out={out}"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli", "demo", *flags], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "runs" / "latest" / "summary.json").read_text())
    assert (summary["steps"], summary["samples"]) == (2, 32)
    assert len(summary["rollout_seconds"]) == 2
    assert 0 <= summary["reward_first"] <= 1
    assert summary["tokens"] > 32
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


def _up(model: Path, folder: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paceline.cli", "up", "--model", str(model), "--folder", str(folder)]
    command += ["--instances=1", "--port=0", *flags, "--", "--kv-cache-memory-bytes=134217728"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError("".join(lines))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_up_leaves_no_process_behind(model: Path, tmp_path: Path, number: signal.Signals) -> None:
    process = _up(model, tmp_path)
    said = _read_until(process, "Ctrl-C to stop")
    assert "instance-0" in said
    started = psutil.Process(process.pid).children(recursive=True)
    assert {each.name() for each in started} >= {
        *("bubbles", "drafts", "gateway", "generation", "policy", "reallocator", "valkey-server")
    }
    process.send_signal(number)
    process.communicate(timeout=120)
    _, alive = psutil.wait_procs(started, timeout=120)
    assert not alive
    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 0)


def test_up_says_why_an_instance_does_not_start(model: Path, tmp_path: Path) -> None:
    command = ["up", "--model", str(model), "--folder", str(tmp_path), "--instances=1", "--port=0"]
    command += ["--", "--dtype=float7"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli", *command], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "float7" in done.stdout
    assert re.search(r"instance-\d\.log", done.stdout)
