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

from deploy.grafana.board import Board, Query
from deploy.grafana.boards import BOARDS
from deploy.grafana.build import FOLDER, render
from tests.support.metric_names import known_labels
from tests.support.promql import selectors, substituted, vectors

register_default_plugins()
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


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_grafana_knows_every_field(path: Path) -> None:
    """Reading drops what the schema does not have, so nothing may be missing afterwards."""
    content = json.loads(path.read_text())
    again = json.loads(json.dumps(Dashboard.from_json(content), cls=JSONEncoder))
    assert again == content


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
        assert selectors(substituted(variable.metric)) <= known_labels().keys()


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
