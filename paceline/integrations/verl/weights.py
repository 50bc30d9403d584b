"""Weights from the processes of a trainer to the fleet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline import types as t
from paceline.integrations.verl.settings import FleetSettings


def push(weights: Iterable[tuple[str, Any]], settings: FleetSettings) -> t.UpdateFinished:
    """Push tensors as the next version, reading them in this thread, where their gathers belong.

    All processes of the trainer gather each tensor, and one pushes. The tensors are read to their end also when
    that fails, so that the others do not wait for it indefinitely.

    Raises:
        PacelineError: the push was refused; the fleet serves what it served.
        ValueError: tensors that cannot be written.
    """
    rest = iter(weights)
    try:
        with settings.client() as client:
            return settings.run(client).push_weights(rest, in_flight=settings.in_flight)
    finally:
        drain(rest)


def drain(weights: Iterable[tuple[str, Any]]) -> None:
    """Take part in gathering tensors that another process pushes."""
    for _ in weights:
        pass
