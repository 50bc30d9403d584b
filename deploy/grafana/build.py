"""Generate the dashboards as JSON for Grafana: `python -m deploy.grafana.build`, into the Helm chart.

The builders of Grafana's SDK check the names and types of all fields.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import (
    barchart,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models import heatmap as heat
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    Threshold,
    ThresholdsMode,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from deploy.grafana.board import NUMBER, PLATFORM, Board, Chart, Choice, Kind, Limits, Query, Variable
from deploy.grafana.boards import BOARDS

FOLDER = Path(__file__).parents[2] / "helm/paceline/files/dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
HEIGHT = 7
"""Height of a chart in rows of Grafana's grid; numbers take half."""
WIDTHS: dict[Kind, int] = {"line": 8, "area": 8, "bars": 8, "heatmap": 8, "stat": 4, "table": 24}
"""Width of a chart in columns, of 24."""
RUNBOOK = "docs/runbook.md"
"""Page to which panels link; the Helm chart has a value for it."""
SLOW = "steps-got-slow"
"""Section of that page on slow steps, which explains the report of a run."""
FINE, WARN, BAD = "#009E73", "#E69F00", "#D55E00"
"""Colours that remain distinct with red-green colour blindness (Okabe and Ito)."""
_UPDATES = f"changes(max by (release) (paceline_gateway_policy_version{{{PLATFORM}}})[1m:15s]) > 0"
_VERSIONS = (
    f"count by (component, version) (paceline_build_info{{{PLATFORM}}})"
    f" unless count by (component, version) (paceline_build_info{{{PLATFORM}}} offset 2m)"
)


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
        .link(dashboard.DashboardLink("Runbook").type(DashboardLinkType.LINK).url(RUNBOOK).target_blank(True))
        .link(
            dashboard.DashboardLink("Steps got slow: paceline report")
            .type(DashboardLinkType.LINK)
            .url(f"{RUNBOOK}#{SLOW}")
            .target_blank(True)
        )
        .annotation(_annotation("Weight updates", _UPDATES, "#56B4E9"))
        .annotation(_annotation("New versions of services", _VERSIONS, "#CC79A7"))
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for variable in board.variables:
        made = made.with_variable(_choice(variable) if isinstance(variable, Choice) else _variable(variable))
    ids = itertools.count(1)
    for section in board.sections:
        made = made.with_row(dashboard.Row(section.title).id(next(ids)))
        for chart in section.charts:
            made = made.with_panel(_panel(chart).id(next(ids)))
    content: dict[str, Any] = json.loads(json.dumps(made.build(), cls=JSONEncoder, sort_keys=True))
    return json.dumps(content, indent=1) + "\n"


def _annotation(name: str, expr: str, colour: str) -> dashboard.AnnotationQuery:
    return (
        dashboard.AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(colour).expr(expr)
    )


def _choice(variable: Choice) -> dashboard.CustomVariable:
    return (
        dashboard.CustomVariable(variable.name)
        .label(variable.label)
        .values(",".join(variable.values))
        .current(VariableOption(selected=True, text=variable.values[0], value=variable.values[0]))
    )


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
        "heatmap": _heatmap,
        "stat": _number,
        "table": _table,
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
    if chart.most is not None:
        panel = panel.max(chart.most)
    if chart.limits is not None:
        panel = panel.thresholds(_thresholds(chart.limits))
    if chart.runbook:
        address = f"{RUNBOOK}#{chart.runbook.lower()}"
        link = dashboard.DashboardLink("Runbook").type(DashboardLinkType.LINK).url(address).target_blank(True)
        panel = panel.links([link])
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
    if kind == "heatmap":
        return made.range().format(PromQueryFormat.HEATMAP)
    if kind in ("bars", "table"):
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
    if chart.limits is not None:
        dashed = common.GraphThresholdsStyleConfig().mode(looks.GraphThresholdsStyleMode.DASHED)
        panel = panel.thresholds_style(dashed)
    return panel if chart.unit == NUMBER else panel.axis_soft_min(0)


def _thresholds(limits: Limits) -> dashboard.ThresholdsConfig:
    first, last = (BAD, FINE) if limits.below else (FINE, BAD)
    low, high = sorted((limits.warn, limits.bad))
    steps = [
        Threshold(value=None, color=first),
        Threshold(value=low, color=WARN),
        Threshold(value=high, color=last),
    ]
    if low == high:
        del steps[1]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _heatmap(chart: Chart) -> heatmap.Panel:
    colours = heatmap.HeatmapColorOptions().mode(heat.HeatmapColorMode.SCHEME).scheme("Viridis").steps(64)
    return heatmap.Panel().color(colours).y_axis(heatmap.YAxisConfig().unit(chart.unit)).cell_gap(0)


def _table(_chart: Chart) -> table.Panel:
    hidden = {"excludeByName": {"Time": True, "Value": True}}
    return table.Panel().with_transformation(DataTransformerConfig(id_val="organize", options=hidden))


def _area(chart: Chart) -> timeseries.Panel:
    stacking = common.StackingConfig().mode(looks.StackingMode.NORMAL)
    return _lines(chart).fill_opacity(40).stacking(stacking)


def _bars(chart: Chart) -> barchart.Panel:
    """Show a bar for each value of the label in the legend, in numeric order, as Prometheus does not sort them."""
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


def _number(chart: Chart) -> stat.Panel:
    latest = common.ReduceDataOptions().calcs(["lastNotNull"])
    judged = looks.BigValueColorMode.NONE if chart.limits is None else looks.BigValueColorMode.BACKGROUND
    return stat.Panel().graph_mode(looks.BigValueGraphMode.NONE).color_mode(judged).reduce_options(latest)


def main() -> None:
    """Write every dashboard."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for board in BOARDS:
        path = FOLDER / f"{board.uid}.json"
        path.write_text(render(board))
        print(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    main()
