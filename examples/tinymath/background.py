"""Watches what the instances pre-generate while a run goes on: the bubbles that get filled.

    with BackgroundWatch(client) as watch:
        ...
        filled = watch.between(began, ended)

An instance says it in its metrics only, so a thread asks for that one metric many times a second.
"""

from __future__ import annotations

import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from itertools import pairwise
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from paceline import Client, PacelineError

METRIC = "paceline_generation_background_samples"
"""Gauge of an instance: samples of a coming step that it generates now."""
_POLL_SECONDS = 0.1
_FLEET_SECONDS = 1.0
_TIMEOUT = 1.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """One instance had `samples` background samples from `begin` to `end`, in seconds."""

    instance_id: str
    begin: float
    end: float
    samples: int


Reading = tuple[float, int]
"""When, in seconds, and how many background samples there were."""


def stretches(instance_id: str, readings: Sequence[Reading], begin: float, end: float) -> list[Stretch]:
    """Return the stretches of pre-generation between `begin` and `end`, times counted from `begin`.

    A reading holds until the next one; before the first and where it says 0 there is nothing.
    """
    found: list[Stretch] = []
    for (at, samples), (until, _) in pairwise([*readings, (end, 0)]):
        left, right = max(at, begin) - begin, min(until, end) - begin
        if not samples or left >= right:
            continue
        last = found[-1] if found else None
        if last is not None and last.samples == samples and last.end == left:
            found[-1] = Stretch(instance_id, last.begin, right, samples)
        else:
            found.append(Stretch(instance_id, left, right, samples))
    return found


class BackgroundWatch:
    """A thread that asks every instance again and again, from `__enter__` to `__exit__`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._readings: dict[str, list[Reading]] = {}
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="background-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def between(self, begin: float, end: float) -> tuple[Stretch, ...]:
        """Return the pre-generation from `begin` to `end` (seconds since the epoch), times counted from `begin`."""
        with self._lock:
            known = {name: list(readings) for name, readings in self._readings.items()}
        return tuple(
            stretch for name in sorted(known) for stretch in stretches(name, known[name], begin, end)
        )

    def _watch(self) -> None:
        addresses: Mapping[str, str] = {}
        asked = float("-inf")
        while not self._ending.wait(_POLL_SECONDS):
            if time.monotonic() - asked > _FLEET_SECONDS:
                addresses, asked = self._addresses(addresses), time.monotonic()
            for name, address in addresses.items():
                samples = read_gauge(address)
                with self._lock:
                    self._readings.setdefault(name, []).append((time.time(), samples))

    def _addresses(self, before: Mapping[str, str]) -> Mapping[str, str]:
        try:
            fleet = self._client.instances()
        except PacelineError:
            return before  # the gateway is away for a moment
        return {instance.instance_id: instance.metrics_address for instance in fleet}


def read_gauge(address: str) -> int:
    """Background samples of the instance whose metrics are at `address`; 0 when it does not answer."""
    query = urllib.parse.urlencode({"name[]": METRIC})
    try:
        with urllib.request.urlopen(f"http://{address}/metrics?{query}", timeout=_TIMEOUT) as answer:
            text = answer.read().decode()
    except (OSError, HTTPException):
        return 0
    values = [sample.value for family in text_string_to_metric_families(text) for sample in family.samples]
    return int(sum(values))
