"""Rules and alerts: complete, documented, and about metrics that exist. promtool's own tests are in integration."""

from __future__ import annotations

import re
from typing import Any

import click
import pytest
import yaml
from typer.main import get_command

from paceline.cli.app import app
from tests.support.metric_names import known_labels
from tests.support.prometheus import ROOT
from tests.support.promql import hastened, vectors

CONTENT = (ROOT / "helm/paceline/files/rules.yaml").read_text()
RULES = [rule for group in yaml.safe_load(CONTENT)["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert", rule.get("record")))
def test_a_rule_reads_metrics_and_labels_that_exist(rule: dict[str, Any]) -> None:
    for name, matched in vectors(rule["expr"]):
        assert name in known_labels(), name
        assert matched <= known_labels()[name]


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_says_how_urgent_it_is_what_it_is_and_where_to_read_on(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() - {"report"} == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{alert.lower()}"


def test_alerts_on_slow_steps_name_a_report_that_the_command_line_makes() -> None:
    named = {alert: rule["annotations"].get("report", "") for alert, rule in ALERTS.items()}
    assert {"PacelineStepsSlow", "PacelineStepOverdue"} <= {
        alert for alert, report in named.items() if report
    }
    context = click.Context(get_command(app))
    for report in filter(None, named.values()):
        program, command, *options = report.split()
        found = get_command(app).get_command(context, command)  # type: ignore[attr-defined]
        assert program == "paceline"
        found.make_parser(context).parse_args(options)


def test_the_runbook_has_a_section_for_every_alert_and_none_besides() -> None:
    runbook = (ROOT / "docs/runbook.md").read_text()
    assert re.findall(r"^## (\w+)$", runbook, re.MULTILINE) != []
    assert set(re.findall(r"^## (\w+)$", runbook, re.MULTILINE)) == ALERTS.keys()
    sections = runbook.split("\n## ")[1:]
    assert sections[0].startswith("What you see\n"), "it begins with symptoms"
    for section in sections[1:]:
        for word in ("**Means.**", "**Look at.**", "**Do.**"):
            assert section.count(word) == 1, section[:40]


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_is_tested_both_ways(alert: str) -> None:
    tests = yaml.safe_load((ROOT / "deploy/prometheus/rules_test.yml").read_text())["tests"]
    checks = [
        check for test in tests for check in test.get("alert_rule_test", ()) if check["alertname"] == alert
    ]
    assert any(check["exp_alerts"] for check in checks), "it never fires"
    assert any(not check["exp_alerts"] for check in checks), "it always fires"


def test_hastened_rules_are_the_same_rules_sooner() -> None:
    quick = [rule for group in hastened(CONTENT)["groups"] for rule in group["rules"]]
    assert [rule["expr"] for rule in quick] != [rule["expr"] for rule in RULES]
    for before, after in zip(RULES, quick, strict=True):
        strip = re.compile(r"\[\w+\]|offset \w+")
        assert strip.sub("", before["expr"]) == strip.sub("", after["expr"])
        assert not re.search(r"\[(?!20s)", after["expr"])
        assert after.get("for", "1s") == "1s"
