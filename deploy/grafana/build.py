"""Generate the dashboards as JSON for Grafana: `python -m deploy.grafana.build`, into the Helm chart.

The builders of Grafana's SDK check the names and types of all fields.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import barchart, common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from deploy.grafana.board import Board, Chart, Kind, Query, Variable
from deploy.grafana.boards import BOARDS

FOLDER = Path(__file__).parents[2] / "helm/paceline/files/dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
HEIGHT = 7
"""Rows of Grafana's grid that a chart takes; a row of numbers takes half."""
WIDTHS = {"line": 8, "area": 8, "bars": 8, "stat": 4}
"""Of 24 columns."""


def render(board: Board) -> str:
    """Return the dashboard as JSON."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.meaning)
        .tags(["paceline"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Paceline")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["paceline"])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for variable in board.variables:
        made = made.with_variable(_variable(variable))
    ids = itertools.count(1)
    for section in board.sections:
        made = made.with_row(dashboard.Row(section.title).id(next(ids)))
        for chart in section.charts:
            made = made.with_panel(_panel(chart).id(next(ids)))
    content: dict[str, Any] = json.loads(json.dumps(made.build(), cls=JSONEncoder, sort_keys=True))
    return json.dumps(content, indent=1) + "\n"


def _variable(variable: Variable) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(variable.name)
        .label(variable.name.capitalize())
        .datasource(SOURCE)
        .query(f"label_values({variable.metric}, {variable.label})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.NATURAL_ASC)
        .include_all(True)
        .multi(True)
        # Matches targets that have no such label, too.
        .all_value(".*")
        .current(VariableOption(selected=True, text="All", value="$__all"))
    )


def _panel(chart: Chart) -> Any:
    makers: dict[str, Callable[[Chart], Any]] = {
        "line": _lines,
        "area": _area,
        "bars": _bars,
        "stat": _number,
    }
    panel = makers[chart.kind](chart)
    panel = (
        panel.title(chart.title)
        .description(chart.meaning)
        .datasource(SOURCE)
        .unit(chart.unit)
        .span(WIDTHS[chart.kind])
        .height(HEIGHT // 2 + 1 if chart.kind == "stat" else HEIGHT)
    )
    for place, query in enumerate(chart.queries):
        panel = panel.with_target(_target(query, place, chart.kind))
    return panel


def _target(query: Query, place: int, kind: Kind) -> prometheus.Dataquery:
    made = (
        prometheus.Dataquery()
        .ref_id(chr(ord("A") + place))
        .datasource(SOURCE)
        .expr(query.expr)
        .legend_format(query.legend or "__auto")
    )
    if kind == "bars":
        return made.instant().format(PromQueryFormat.TABLE)
    return made.instant() if kind == "stat" else made.range()


def _lines(chart: Chart) -> timeseries.Panel:
    panel = (
        timeseries.Panel()
        .draw_style(looks.GraphDrawStyle.LINE)
        .line_width(1)
        .show_points(looks.VisibilityMode.NEVER)
        .fill_opacity(8)
        .tooltip(
            common.VizTooltipOptions().mode(looks.TooltipDisplayMode.MULTI).sort(looks.SortOrder.DESCENDING)
        )
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(looks.LegendDisplayMode.LIST)
            .placement(looks.LegendPlacement.BOTTOM)
        )
    )
    return panel if chart.unit == "none" else panel.axis_soft_min(0)


def _area(chart: Chart) -> timeseries.Panel:
    stacking = common.StackingConfig().mode(looks.StackingMode.NORMAL)
    return _lines(chart).fill_opacity(40).stacking(stacking)


def _bars(chart: Chart) -> barchart.Panel:
    """Show a bar for each value of the label in the legend, in numeric order, which Prometheus does not provide."""
    (query,) = chart.queries
    label = query.legend.strip("{}")

    def convert(kind: str) -> DataTransformerConfig:
        conversions = [{"targetField": label, "destinationType": kind}]
        return DataTransformerConfig(id_val="convertFieldType", options={"conversions": conversions})

    hidden = DataTransformerConfig(id_val="organize", options={"excludeByName": {"Time": True}})
    ordered = DataTransformerConfig(id_val="sortBy", options={"sort": [{"field": label}]})
    panel = barchart.Panel().x_field(label).min(0).fill_opacity(80)
    for step in (hidden, convert("number"), ordered, convert("string")):
        panel = panel.with_transformation(step)
    return panel


def _number(_chart: Chart) -> stat.Panel:
    latest = common.ReduceDataOptions().calcs(["lastNotNull"])
    return stat.Panel().graph_mode(looks.BigValueGraphMode.NONE).reduce_options(latest)


def main() -> None:
    """Write every dashboard."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for board in BOARDS:
        path = FOLDER / f"{board.uid}.json"
        path.write_text(render(board))
        print(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    main()
