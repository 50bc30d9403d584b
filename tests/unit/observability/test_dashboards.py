"""The dashboards that are delivered: made by the program, readable by Grafana, and about metrics that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.board import SHARE, Board, Chart, Choice, Query
from deploy.grafana.boards import BOARDS
from deploy.grafana.build import FOLDER, render
from tests.support.metric_names import known_labels
from tests.support.promql import selectors, substituted, vectors

register_default_plugins()
RUNBOOK = (FOLDER.parents[3] / "docs/runbook.md").read_text()
UIDS = [board.uid for board in BOARDS]


def queries(board: Board) -> Iterator[Query]:
    for section in board.sections:
        for chart in section.charts:
            yield from chart.queries


@pytest.mark.parametrize("board", BOARDS, ids=UIDS)
def test_the_delivered_file_is_what_the_program_makes(board: Board) -> None:
    assert (FOLDER / f"{board.uid}.json").read_text() == render(board), "run python -m deploy.grafana.build"


def test_no_other_file_is_delivered() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {f"{uid}.json" for uid in UIDS}


def missing(content: Any, again: Any, where: str = "") -> Iterator[str]:
    """Yield the places of `content` that are not in `again`, which may have defaults besides."""
    if isinstance(content, dict) and isinstance(again, dict):
        for name, value in content.items():
            yield from missing(value, again.get(name), f"{where}.{name}")
    elif isinstance(content, list) and isinstance(again, list) and len(content) == len(again):
        for place, (value, other) in enumerate(zip(content, again, strict=True)):
            yield from missing(value, other, f"{where}[{place}]")
    elif content != again:
        yield f"{where}: {content}, not {again}"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_grafana_knows_every_field(path: Path) -> None:
    """Reading drops what the schema does not have, so nothing may be missing afterwards."""
    content = json.loads(path.read_text())
    again = json.loads(json.dumps(Dashboard.from_json(content), cls=JSONEncoder))
    assert not list(missing(content, again))


@pytest.mark.parametrize("board", BOARDS, ids=UIDS)
def test_every_expression_reads_metrics_and_labels_that_exist(board: Board) -> None:
    labels = known_labels()
    for query in queries(board):
        for name, matched in vectors(substituted(query.expr)):
            assert name in labels, f"{name} in {query.expr}"
            assert matched <= labels[name], f"{name} has {labels[name]}, not {matched}"


@pytest.mark.parametrize("board", BOARDS, ids=UIDS)
def test_legends_name_labels_that_their_series_have(board: Board) -> None:
    for query in queries(board):
        named = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
        kept = {label for found in re.findall(r"by \(([^)]*)\)", query.expr) for label in found.split(", ")}
        assert named <= kept, f"{query.legend} of {query.expr}"


@pytest.mark.parametrize("board", BOARDS, ids=UIDS)
def test_every_choice_at_the_top_is_used_and_every_used_one_is_there(board: Board) -> None:
    offered = {variable.name for variable in board.variables}
    used = {
        name
        for query in queries(board)
        for name in re.findall(r"\$(\w+)", query.expr)
        if not name.startswith("__")
    }
    assert used == offered
    for variable in board.variables:
        if isinstance(variable, Choice):
            continue
        assert selectors(substituted(variable.metric)) <= known_labels().keys()


def charts(board: Board) -> Iterator[Chart]:
    for section in board.sections:
        yield from section.charts


@pytest.mark.parametrize("board", BOARDS, ids=UIDS)
def test_every_panel_says_what_it_shows_in_which_unit(board: Board) -> None:
    for chart in charts(board):
        assert re.fullmatch(r"[A-Za-z0-9`].*[.]", chart.meaning, re.DOTALL), chart.title
        assert chart.unit not in ("", "short"), chart.title


def test_shares_end_at_one_but_for_those_that_can_be_more() -> None:
    more = {
        chart.title
        for board in BOARDS
        for chart in charts(board)
        if chart.unit == SHARE and chart.most != 1 and chart.kind != "stat"
    }
    assert more == {
        "Coverage",  # what there was ahead may be more than the step then took
        "Error of predicted step times",
        "Gain of moves",
        "Refusals",  # a sample can be refused by several
        "Tokens out of drafts",
        "Training seconds per second",
        "Trust in predicted gains",
    }


def test_every_panel_with_a_section_in_the_runbook_leads_there() -> None:
    alerts = set(re.findall(r"^## (\w+)$", RUNBOOK, re.MULTILINE))
    led = {chart.runbook for board in BOARDS for chart in charts(board) if chart.runbook}
    assert len(led) > 15
    assert led <= alerts
    for board in BOARDS:
        content = json.loads((FOLDER / f"{board.uid}.json").read_text())
        links = [link["url"] for panel in panels(content) for link in panel.get("links", ())]
        assert links == [
            f"docs/runbook.md#{chart.runbook.lower()}" for chart in charts(board) if chart.runbook
        ]
        urls = [link.get("url") for link in content["links"]]
        assert urls[1:] == ["docs/runbook.md", "docs/runbook.md#steps-got-slow"]
    assert "\n### Steps got slow\n" in RUNBOOK


@pytest.mark.parametrize("board", BOARDS, ids=UIDS)
def test_a_large_fleet_shows_its_largest_and_the_median(board: Board) -> None:
    """A line for each of a thousand instances is a blur, and slow."""
    for query in queries(board):
        if re.search(r"\{\{(instance|instance_id|pod)\}\}", query.legend) and "redis_" not in query.expr:
            if "budget" in query.legend or query.expr.startswith("sum by (instance) (paceline_drafts_b"):
                continue  # draft stores are few
            assert query.expr.startswith("topk($top, "), query.expr


def test_weight_updates_and_new_versions_are_marked() -> None:
    for board in BOARDS:
        marks = json.loads((FOLDER / f"{board.uid}.json").read_text())["annotations"]["list"]
        assert len(marks) == 2
        for mark in marks:
            for name, matched in vectors(substituted(mark["expr"])):
                assert name in known_labels()
                assert matched <= known_labels()[name]


def test_only_series_of_the_platform_chosen_are_shown() -> None:
    """Two releases in a namespace are two platforms; exporters belong to none."""
    elsewhere = re.compile(r"DCGM_|redis_(?!up)|ALERTS|(namespace|part):paceline")
    for board in BOARDS:
        for query in queries(board):
            for name, matched in vectors(substituted(query.expr)):
                assert elsewhere.match(name) or {"namespace", "release"} <= matched, query.expr


def panels(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in content["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_panels_stand_side_by_side_and_ask_the_chosen_source(path: Path) -> None:
    content = json.loads(path.read_text())
    ids = [panel["id"] for panel in content["panels"]]
    assert len(set(ids)) == len(ids)
    assert 0 not in ids
    taken: set[tuple[int, int]] = set()
    for panel in panels(content):
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        assert panel["datasource"]["uid"] == "${datasource}"
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
    assert content["templating"]["list"][0]["name"] == "datasource"
