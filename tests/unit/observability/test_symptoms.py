"""The symptoms at the beginning of the runbook: each leads to panels, a command and sections that exist."""

from __future__ import annotations

import re

import click
import pytest
from typer.main import get_command

from deploy.grafana.boards import BOARDS
from paceline.cli.app import app
from tests.support.prometheus import ROOT

TEXT = (ROOT / "docs/runbook.md").read_text()
SYMPTOMS = {
    section.partition("\n")[0]: section
    for section in TEXT.split("\n## ")[1].split("\n### ")[1:]
    if TEXT.split("\n## ")[1].startswith("What you see\n")
}
PANELS = {
    board.title.removeprefix("Paceline / "): {chart.title for part in board.sections for chart in part.charts}
    for board in BOARDS
}
SECTIONS = {
    re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in re.findall(r"^##+ (.*)$", TEXT, re.M)
}


def paragraph(symptom: str, name: str) -> str:
    """Return the paragraph of a symptom that begins with a bold name."""
    (found,) = re.findall(rf"^\*\*{name}\.\*\* (.*(?:\n.+)*)", SYMPTOMS[symptom], re.M)
    return str(found)


def test_the_runbook_begins_with_what_operators_see() -> None:
    assert list(SYMPTOMS) == [
        *("Steps got slow", "GPUs idle", "The trainer waits"),
        *("A batch does not end", "A version does not arrive"),
    ]


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_a_symptom_names_panels_of_boards(symptom: str) -> None:
    panels = re.findall(r"\*([^*]+)\*: ((?:`[^`]+`(?:, )?)+)", paragraph(symptom, "Panel"))
    assert panels
    for board, titles in panels:
        assert set(re.findall("`([^`]+)`", titles)) <= PANELS[board], board


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_a_symptom_names_a_command(symptom: str) -> None:
    assert re.search(r"`paceline \w+", paragraph(symptom, "Command"))


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`(paceline [a-z][^`]*)`", TEXT))))
def test_a_command_that_the_runbook_names_exists_with_its_options(command: str) -> None:
    found = get_command(app)
    words = command.split()[1:]
    while words and isinstance(found, click.Group):
        name = words.pop(0)
        made = found.get_command(click.Context(found), name)
        assert made is not None, name
        found = made
    found.make_parser(click.Context(found)).parse_args(words)


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_a_symptom_leads_to_sections_that_exist(symptom: str) -> None:
    led = set(re.findall(r"\]\(#([\w-]+)\)", SYMPTOMS[symptom]))
    assert any(each.startswith("paceline") for each in led), "no section of an alert"
    assert led <= SECTIONS
