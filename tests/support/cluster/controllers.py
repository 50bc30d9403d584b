"""What the controllers of workloads do next: pods to create, and pods to delete.

Only what the chart renders: the order of updates in general is for a real controller to show.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ROLLING = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
_BY_PARTS = {"type": "RollingUpdate"}


@dataclass(frozen=True, slots=True)
class Seen:
    """A pod of a workload, as its controller sees it. `revision` is that of the template it was made of."""

    name: str
    revision: str
    ready: bool
    ending: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """Names of pods to create (of StatefulSets), a number of them (of Deployments), and names of pods to delete."""

    create: tuple[str, ...] = ()
    count: int = 0
    delete: tuple[str, ...] = ()


def revision_of(template: Mapping[str, Any]) -> str:
    """Return a name of a pod template's content."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:8]


def deployment(spec: Mapping[str, Any], pods: Sequence[Seen]) -> Step:
    """Return the next step of a Deployment with that spec. ValueError for a strategy that is not played."""
    wanted, revision = spec["replicas"], revision_of(spec["template"])
    new = [each for each in pods if each.revision == revision and not each.ending]
    old = [each for each in pods if each.revision != revision]
    strategy = spec.get("strategy")
    if strategy == {"type": "Recreate"}:
        if old:
            return Step(delete=tuple(each.name for each in old if not each.ending))
        return _resized(wanted, new)
    if strategy != _ROLLING:
        raise ValueError(f"a strategy that is not played: {strategy}")
    old = [each for each in old if not each.ending]
    if not old:
        return _resized(wanted, new)
    count = max(0, min(wanted - len(new), wanted + 1 - len(new) - len(old)))
    # Old ones that are not ready are nobody's loss; of the ready ones so many may go as leave enough.
    spare = sum(each.ready for each in (*new, *old)) - wanted
    unready = [each.name for each in old if not each.ready]
    ready = [each.name for each in old if each.ready]
    return Step(count=count, delete=(*unready, *ready[: max(0, spare)]))


def stateful_set(name: str, spec: Mapping[str, Any], pods: Sequence[Seen]) -> Step:
    """Return the next step of a StatefulSet with that name and spec. ValueError for what is not played."""
    if spec.get("podManagementPolicy") != "Parallel" or spec.get("updateStrategy", _BY_PARTS) != _BY_PARTS:
        raise ValueError(f"{name}: an order of pods or of updates that is not played")
    revision, there = revision_of(spec["template"]), {each.name: each for each in pods}
    names = [f"{name}-{ordinal}" for ordinal in range(spec["replicas"])]
    missing = tuple(each for each in names if each not in there)
    surplus = tuple(each.name for each in pods if each.name not in names and not each.ending)
    if missing or surplus:
        return Step(create=missing, delete=surplus)
    # From the highest down, and no further while one is not ready.
    for each in reversed([there[name] for name in names]):
        if each.revision != revision:
            return Step() if each.ending else Step(delete=(each.name,))
        if not each.ready or each.ending:
            return Step()
    return Step()


def _resized(wanted: int, pods: Sequence[Seen]) -> Step:
    surplus = sorted(pods, key=lambda each: each.ready)[: max(0, len(pods) - wanted)]
    return Step(count=max(0, wanted - len(pods)), delete=tuple(each.name for each in surplus))
