"""Dashboards as plain data, and the PromQL that charts share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

NAMESPACE = 'namespace=~"$namespace"'
"""Selects the platform; without such a label on the targets, everything."""
INSTANCE = f'{NAMESPACE},instance=~"$instance"'
"""Selects scraped processes of the platform."""
WINDOW = "$__rate_interval"

Kind = Literal["line", "area", "bars", "stat"]


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and the name of its series, with {{label}}s."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """A panel. `unit` is Grafana's name of a unit; `kind` is line, stacked area, bars by label, or a number."""

    title: str
    unit: str
    queries: Sequence[Query]
    meaning: str = ""
    kind: Kind = "line"


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
class Board:
    """A dashboard. Its `uid` is also the name of its file."""

    uid: str
    title: str
    meaning: str
    variables: Sequence[Variable]
    sections: Sequence[Section]


NAMESPACES = Variable("namespace", "paceline_build_info", "namespace")
INSTANCES = Variable("instance", 'paceline_generation_policy_version{namespace=~"$namespace"}', "instance")
RUNS = Variable("run", 'paceline_gateway_step{namespace=~"$namespace"}', "run")


def rate(metric: str, by: str = "", where: str = NAMESPACE) -> str:
    """Return the increase of a counter per second, summed by labels."""
    return f"sum by ({by}) (rate({metric}{{{where}}}[{WINDOW}]))"


def ratio(part: str, whole: str, by: str = "", where: str = NAMESPACE) -> str:
    """Return the increase of one counter divided by that of another, while the other increases."""
    return f"{rate(part, by, where)} / ({rate(whole, by, where)} > 0)"


def share(part: str, whole: str, by: str = "", of: str = NAMESPACE) -> str:
    """Return `ratio` for a counter whose series appear with its first increase; `of` selects its series."""
    return f"({rate(part, by, of)} or {rate(whole, by)} * 0) / ({rate(whole, by)} > 0)"


def mean(histogram: str, by: str = "", where: str = NAMESPACE) -> str:
    """Return the mean of a histogram's observations."""
    return ratio(f"{histogram}_sum", f"{histogram}_count", by, where)


def quantile(q: float, histogram: str, by: str = "", where: str = NAMESPACE) -> str:
    """Return a quantile of a histogram's observations."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', labels, where)})"


def gauge(metric: str, by: str = "", where: str = NAMESPACE, how: str = "sum") -> str:
    """Return a gauge, aggregated by labels."""
    return f"{how} by ({by}) ({metric}{{{where}}})"


def quantiles(histogram: str, legend: str = "", where: str = NAMESPACE) -> tuple[Query, ...]:
    """Return median and 95th percentile."""
    return tuple(Query(quantile(q, histogram, where=where), f"{legend}p{q * 100:.0f}") for q in (0.5, 0.95))
