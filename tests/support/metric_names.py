"""Which names and labels queries may use."""

from __future__ import annotations

import functools

import yaml

from deploy.prometheus.catalogue import SERVICES, metrics
from tests.support.prometheus import ROOT
from tests.support.promql import parsed

TARGET = frozenset({"job", "instance", "namespace", "release"})
"""Labels that Prometheus gives to everything that it scrapes; `namespace` and `release` on Kubernetes only."""
EXPORTER = (
    *("redis_aof_last_write_status", "redis_aof_last_bgrewrite_status", "redis_evicted_keys_total"),
    *("redis_memory_used_bytes", "redis_memory_max_bytes", "redis_commands_processed_total"),
    "redis_connected_clients",
)
"""Metrics of redis_exporter, as its version in the chart names them."""
GPU_EXPORTER = (
    *(
        "DCGM_FI_DEV_GPU_UTIL",
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        "DCGM_FI_DEV_FB_USED",
        "DCGM_FI_DEV_FB_FREE",
    ),
    *("DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_XID_ERRORS"),
)
"""Metrics of NVIDIA's dcgm-exporter that are in its default list."""
OTHERS = {
    name: TARGET for name in ("up", "process_cpu_seconds_total", "process_resident_memory_bytes", *EXPORTER)
}
OTHERS |= {name: TARGET | {"pod", "gpu"} for name in GPU_EXPORTER}
OTHERS["ALERTS"] = TARGET | {"alertname", "alertstate", "severity", "instance_id", "method"}
_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count")}


@functools.cache
def known_labels() -> dict[str, frozenset[str]]:
    """Labels by name of the series: those of services, those of recording rules, and a few that everybody has."""
    found: dict[str, frozenset[str]] = dict(OTHERS)
    for service in SERVICES:
        for metric in metrics(service):
            labels = TARGET | set(metric.labels)
            for suffix in _SUFFIXES.get(metric.kind, ("",)):
                found[metric.name + suffix] = labels | ({"le"} if suffix == "_bucket" else set())
            if metric.kind == "info":
                found[metric.name] = labels | {"component", "version", "model", "device", "speculation"}
    rules = yaml.safe_load((ROOT / "helm/paceline/files/rules.yaml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "record" in rule:
                parsed(rule["expr"])
                found[rule["record"]] = frozenset({"namespace", *rule["record"].split(":")[:1]})
    return found
