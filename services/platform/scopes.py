"""Which scope of a token a method needs. Pure.

What a method is not listed for here is for the services alone, so that a new method is closed until somebody
has thought about it.
"""

from __future__ import annotations

from enum import StrEnum


class Scope(StrEnum):
    """What a token may do."""

    ROLLOUTS = "rollouts"
    """Have samples generated and read them: the data of a run."""
    WEIGHTS = "weights"
    """Change the weights that samples are drawn from."""
    FLEET = "fleet"
    """Control: pause, resume and drain instances, set policies."""
    METRICS = "metrics"
    """Scrape the metrics port."""
    INTERNAL = "internal"
    """The protocol between services. Not for people or trainers."""


_READERS = frozenset({Scope.ROLLOUTS, Scope.WEIGHTS, Scope.FLEET})
"""Whoever works with the platform may see what it is doing."""

_SERVICES: dict[str, frozenset[Scope]] = {
    "paceline.v1.RolloutService": frozenset({Scope.ROLLOUTS}),
    "paceline.v1.WeightService": frozenset({Scope.WEIGHTS}),
    "paceline.v1.FleetService": frozenset({Scope.FLEET}),
    "grpc.reflection.v1alpha.ServerReflection": _READERS,
}
_METHODS: dict[str, frozenset[Scope]] = {
    "paceline.v1.WeightService/GetVersions": _READERS,
    "paceline.v1.FleetService/ListInstances": _READERS,
    "paceline.v1.FleetService/WatchFleet": _READERS,
    "paceline.v1.FleetService/GetPolicy": _READERS,
    "paceline.v1.FleetService/GetDrafter": _READERS,
    "paceline.v1.FleetService/WatchDecisions": _READERS,
}


def scopes_for(method: str) -> frozenset[Scope]:
    """The scopes of which one lets a token call "/package.Service/Method"; INTERNAL always does."""
    name = method.removeprefix("/")
    service = name.partition("/")[0]
    return _METHODS.get(name, _SERVICES.get(service, frozenset())) | {Scope.INTERNAL}
