"""The list of metrics in the documentation, and the names in it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from prometheus_client.metrics import MetricWrapperBase

from deploy.prometheus import catalogue
from services.platform.observability.metrics import MetricSet
from tests.support.prometheus import ROOT

METRICS = {metric.name: metric for service in catalogue.SERVICES for metric in catalogue.metrics(service)}
UNITS = ("_seconds", "_bytes", "_ratio", "_tokens", "_steps", "_samples", "_gain")
KINDS = {"Counter", "Gauge", "Histogram", "Info", "Summary", "Enum"}


def test_the_documentation_lists_what_services_register() -> None:
    text = catalogue.DOCUMENT.read_text()
    assert text == catalogue.document(text), "run python -m deploy.prometheus.catalogue"


def makers() -> set[str]:
    """Source files of services that make metrics."""
    found = set()
    for path in (ROOT / "services").rglob("*.py"):
        source = path.read_text()
        imported = re.search(r"^from prometheus_client import (.*)$", source, re.MULTILINE)
        kinds = KINDS & {name.strip() for name in imported[1].split(",")} if imported else set()
        if any(re.search(rf"\b{kind}\(", source) for kind in kinds):
            found.add(str(path.relative_to(ROOT)))
    return found


def test_no_metric_is_made_where_the_list_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: set[str] = set()
    make = MetricWrapperBase.__init__

    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT / "services"):
                looked_at.add(str(path.relative_to(ROOT)))
            frame = frame.f_back
        make(self, *args, **kwargs)

    monkeypatch.setattr(MetricWrapperBase, "__init__", noting)
    for service in catalogue.SERVICES:
        catalogue.metrics(service)
    # Made once in a process, and registered by the list as they are.
    once = {"services/platform/redis/connection.py", "services/platform/security/certificates.py"}
    assert makers() - looked_at <= once


def test_no_set_of_metrics_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made: set[str] = set()
    make = MetricSet.__init__

    def noting(self: MetricSet, *args: Any, **kwargs: Any) -> None:
        made.add(type(self).__name__)
        make(self, *args, **kwargs)

    monkeypatch.setattr(MetricSet, "__init__", noting)
    for service in catalogue.SERVICES:
        catalogue.metrics(service)
    declared = set[str]()
    for path in (ROOT / "services").rglob("*metrics.py"):
        declared |= set(re.findall(r"^class (\w+)\(\w+, prefix=", path.read_text(), re.MULTILINE))
    assert len(declared) > 10
    assert declared <= made


@pytest.mark.parametrize("name", METRICS)
def test_names_follow_the_conventions(name: str) -> None:
    metric = METRICS[name]
    assert re.fullmatch(r"paceline(_[a-z0-9]+)+", name)
    assert (metric.kind == "counter") == name.endswith("_total")
    assert (metric.kind == "info") == name.endswith("_info")
    if metric.kind == "histogram":
        assert name.endswith(UNITS)
    for spelled in ("milli", "_ms", "percent", "_mb", "_gb"):
        assert spelled not in name


@pytest.mark.parametrize("name", METRICS)
def test_labels_are_few_and_leave_prometheus_its_own(name: str) -> None:
    labels = METRICS[name].labels
    # Labels that Prometheus or its operator put on every target.
    assert not {"job", "instance", "namespace", "pod", "container", "service", "endpoint"} & set(labels)
    # Without bound: a series for each would never end.
    assert not {"sample", "batch", "prompt", "request", "prompt_id", "batch_id", "request_id"} & set(labels)


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_says_what_it_is(name: str) -> None:
    assert re.fullmatch(r"\S.{6,}[.]", METRICS[name].meaning)
