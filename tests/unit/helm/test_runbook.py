"""docs/runbook.md: what breaks with a cluster, in objects and values that this chart has."""

from __future__ import annotations

import re
from typing import Any

import yaml
from typer.main import get_command

from paceline.cli.app import app
from tests.unit.helm.release import CHART, ROOT, render

TEXT = (ROOT / "docs/runbook.md").read_text()
SYMPTOMS = "What you see"
INCIDENTS = {
    section.partition("\n")[0]: section
    for section in TEXT.split("\n## ")[1:]
    if " " in section.partition("\n")[0] and not section.startswith(SYMPTOMS)
}
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


def test_there_is_a_section_for_what_breaks_with_a_cluster() -> None:
    assert INCIDENTS.keys() == {
        *("A node is dead", "Redis is full or lost", "A volume is full"),
        *("A certificate has expired", "A wrong image", "A drain is stuck"),
    }


def test_each_says_what_was_tried_of_its_commands() -> None:
    for title, section in INCIDENTS.items():
        assert section.count("**Tried.**") == 1, title
        assert re.search(r"^```sh$", section, re.MULTILINE), title


def test_values_that_are_named_are_values_of_the_chart() -> None:
    named = re.findall(rf"`((?:{'|'.join(VALUES)})\.[\w.]+)", TEXT)
    assert len(named) >= 8
    for path in named:
        holder: Any = VALUES
        for name in path.split("."):
            # Settings of a service are not in the file; their schema is tested elsewhere.
            if name == "config":
                break
            assert name in holder, path
            holder = holder[name]


def test_objects_that_are_named_are_made() -> None:
    release = render({"generation": {"pools": [{"name": "h100"}]}})
    made = {name for each in release.manifests for name in [each["metadata"]["name"]]}
    made |= {each["spec"]["secretName"] for each in release.all("Certificate")}
    claims = {
        f"{claim['metadata']['name']}-{each['metadata']['name']}"
        for each in release.all("StatefulSet")
        for claim in each["spec"].get("volumeClaimTemplates", [])
    }
    named = re.findall(r"(?:statefulset|secret|pod|pvc)[/ ](?:--namespace ml )?([\w-]*paceline-[\w-]+)", TEXT)
    assert len(named) >= 6
    for name in named:
        assert name in made | claims or name.rpartition("-")[0] in made | claims, name


def test_commands_of_paceline_have_these_options() -> None:
    known = get_command(app).commands  # type: ignore[attr-defined]
    for name, rest in re.findall(r"^paceline (\w+)(.*)$", TEXT, re.MULTILINE):
        options = {option for each in known[name].params for option in each.opts}
        assert set(re.findall(r"--[\w-]+", rest)) <= options
