"""Dashboards as plain data, and the PromQL that charts share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PLATFORM = 'namespace=~"$namespace",release=~"$release"'
"""Selector of the platform; without such labels on the targets it selects everything."""
INSTANCE = f'{PLATFORM},instance=~"$instance"'
"""Selector of scraped processes of the platform."""
RUN = f'{PLATFORM},run=~"$run"'
"""Selector of runs."""
WINDOW = "$__rate_interval"

SHARE = "percentunit"
SECONDS = "s"
BYTES = "bytes"
NUMBER = "none"
TIMES = "suffix: times"
TOKENS = "si: tok"
TOKENS_PER_SECOND = "si: tok/s"
SAMPLES = "si: samples"
PER_SECOND = "si: /s"
PER_HOUR = "suffix: /h"

Kind = Literal["line", "area", "bars", "stat", "heatmap", "table"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Values from which a metric deserves attention, and from which it is wrong; with `below`, down to which."""

    warn: float
    bad: float
    below: bool = False


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression, and the name of its series with {{label}}s."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """A panel. `unit` is a unit name of Grafana. A `stat` shows the latest value, `bars` the values of a label."""

    title: str
    unit: str
    queries: Sequence[Query]
    meaning: str
    """Explanation for a reader who has not seen the panel before."""
    kind: Kind = "line"
    limits: Limits | None = None
    most: float | None = None
    """End of the axis, for values with a maximum."""
    runbook: str = ""
    """Alert whose section of the runbook is linked from the panel."""


@dataclass(frozen=True, slots=True)
class Section:
    """Charts under one heading."""

    title: str
    charts: Sequence[Chart]


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of a dashboard: values of a label of a metric, all selected at first."""

    name: str
    metric: str
    label: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A variable of a dashboard with given values, the first of them selected at first."""

    name: str
    label: str
    values: Sequence[str]


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard. Its `uid` is also the name of its file."""

    uid: str
    title: str
    meaning: str
    variables: Sequence[Variable | Choice]
    sections: Sequence[Section]


NAMESPACES = Variable("namespace", "paceline_build_info", "namespace")
RELEASES = Variable("release", 'paceline_build_info{namespace=~"$namespace"}', "release")
INSTANCES = Variable("instance", f"paceline_generation_policy_version{{{PLATFORM}}}", "instance")
RUNS = Variable("run", f"paceline_gateway_step{{{PLATFORM}}}", "run")
TOP = Choice("top", "Instances at most", ("10", "20", "50", "1000"))
"""Most instances that a panel names; all of a large fleet would be unreadable."""


def rate(metric: str, by: str = "", where: str = PLATFORM) -> str:
    """Return the increase of a counter per second, summed by labels."""
    return f"sum by ({by}) (rate({metric}{{{where}}}[{WINDOW}]))"


def ratio(part: str, whole: str, by: str = "", where: str = PLATFORM) -> str:
    """Return the increase of one counter divided by the increase of another, while the other increases."""
    return f"{rate(part, by, where)} / ({rate(whole, by, where)} > 0)"


def share(part: str, whole: str, by: str = "", of: str = PLATFORM) -> str:
    """Return `ratio` for a counter whose series appear with its first increase; `of` selects its series."""
    return f"({rate(part, by, of)} or {rate(whole, by)} * 0) / ({rate(whole, by)} > 0)"


def mean(histogram: str, by: str = "", where: str = PLATFORM) -> str:
    """Return the mean of a histogram's observations."""
    return ratio(f"{histogram}_sum", f"{histogram}_count", by, where)


def quantile(q: float, histogram: str, by: str = "", where: str = PLATFORM) -> str:
    """Return a quantile of a histogram's observations."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', labels, where)})"


def gauge(metric: str, by: str = "", where: str = PLATFORM, how: str = "sum") -> str:
    """Return a gauge, aggregated by labels."""
    return f"{how} by ({by}) ({metric}{{{where}}})"


def quantiles(histogram: str, legend: str = "", where: str = PLATFORM) -> tuple[Query, ...]:
    """Return median and 95th percentile."""
    return tuple(Query(quantile(q, histogram, where=where), f"{legend}p{q * 100:.0f}") for q in (0.5, 0.95))


def heat(histogram: str, where: str = PLATFORM) -> tuple[Query, ...]:
    """Return a histogram's buckets over time."""
    return (Query(rate(f"{histogram}_bucket", "le", where), "{{le}}"),)


def largest(expr: str, legend: str) -> tuple[Query, ...]:
    """Return the largest of an expression's series, by name, and the median of all."""
    return Query(f"topk($top, {expr})", legend), Query(f"quantile(0.5, {expr})", "median of all")


def each_instance(expr: str, what: str = "") -> tuple[Query, ...]:
    """Return `largest` of an expression by `instance`."""
    return largest(expr, f"{what} {{{{instance}}}}".strip())
