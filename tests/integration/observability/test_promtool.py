"""promtool's own opinion: the rules are valid, every alert fires when it should and else does not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml

from tests.support.prometheus import ROOT, tools
from tests.unit.helm.release import render


def promtool(*arguments: str) -> str:
    """Return the output of promtool; fail with it if promtool does."""
    command = [str(tools() / "promtool"), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rules_and_configuration_are_valid(tmp_path: Path) -> None:
    rules, config = "helm/paceline/files/rules.yaml", "deploy/prometheus/prometheus.yml"
    assert "rules found" in promtool("check", "rules", rules)
    # Beside a platform that runs.
    files = {name: (ROOT / name).read_text() for name in (rules, config)}
    for name, text in {**files, "runs/local/targets.json": "[]", "runs/local/token": "pl_token"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert "SUCCESS" in promtool("check", "config", "--lint-fatal", str(tmp_path / config))


def test_the_rules_of_one_release_are_valid_too(tmp_path: Path) -> None:
    monitored = {"podMonitors": {"enabled": True}, "rules": {"enabled": True}}
    (rule,) = render({"monitoring": monitored}).all("PrometheusRule")
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(rule["spec"]))
    assert "rules found" in promtool("check", "rules", str(path))


def test_every_alert_fires_when_it_should_and_only_then() -> None:
    assert "SUCCESS" in promtool("test", "rules", "deploy/prometheus/rules_test.yml")
