"""Follows samples that instances move among themselves: claimed where they are, or resumed by their prefix."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import structlog

from paceline.internal.v1 import generation_pb2
from services.gateway.batch import Phase, Verdict
from services.gateway.links import Held, WorkLink
from services.gateway.metrics import GatewayMetrics
from services.gateway.running import Running
from services.gateway.transit import Transit, Traveller
from services.platform.tracing import Span

log = structlog.get_logger(__name__)


class Home(Protocol):
    """What is used of the dispatcher."""

    links: dict[str, WorkLink]

    def running(self, held: Held) -> Running | None:
        """The batch of a sample, if it is still being worked on."""

    def work_left(self, running: Running, index: int) -> float:
        """Tokens that a sample is predicted to need still."""

    def trace(self, running: Running, index: int) -> Span:
        """The span of a sample's attempt."""

    def take_back(self, held: Held, verdict: Verdict, cause: str) -> None:
        """Takes in what became of a sample that no instance has any more."""

    def pump_soon(self) -> None:
        """Places waiting samples."""

    def place_on(self, held: Held, instance_id: str) -> bool:
        """Gives a sample that waits to this instance; False when that cannot take it, and it waits for any."""

    def set_aside(self, held: Held) -> bool:
        """Takes a sample that waits out of the queue, for a while; False when it does not wait."""

    def put_back(self, held: Held) -> None:
        """Lets a sample that was set aside wait again."""


class Moves:
    """`wait_seconds`: how long a sample waits for the link to the instance that has it."""

    def __init__(self, home: Home, metrics: GatewayMetrics, wait_seconds: float) -> None:
        self.transit = Transit()
        self._home = home
        self._metrics = metrics
        self._wait_seconds = wait_seconds
        self._loop = asyncio.get_running_loop()

    def moved(self, link: WorkLink, moved: generation_pb2.Moved, now: float) -> None:
        """An instance has moved a sample, with its KV, to another one, which decodes on."""
        held = link.release(moved.handle)
        if held is None:
            return
        batch, index, attempt = held.batch, held.index, held.attempt
        new = batch.moved(index, attempt, moved.instance_id, moved.response_tokens, now)
        if new is None and _is_wanted(held):
            self._metrics.moves.labels("tokens_missing").inc()
            log.error("moved_sample_incomplete", batch=batch.key, sample=index, instance=link.instance_id)
            self._home.take_back(held, batch.lost(index, attempt, now), "tokens_missing")
        held.trace.end(verdict="moved", to=moved.instance_id, tokens=moved.response_tokens)
        there = Held(
            batch, index, new or attempt, held.prompt, held.predicted, migration_id=moved.migration_id
        )
        running = self._home.running(there)
        if running is not None and _is_wanted(there):
            running.places.pop(index, None)
            there.trace = self._home.trace(running, index)
            there.predicted = self._home.work_left(running, index)
        traveller = Traveller(there, moved.instance_id, moved.migration_id)
        if moved.instance_id in self._home.links:
            self._claim(self._home.links[moved.instance_id], traveller)
        else:
            self.transit.wait(traveller)
            self._loop.call_later(self._wait_seconds, self._unclaimed, traveller)

    def handed_on(self, held: Held, instance_id: str) -> None:
        """An instance has ended a sample that is to go on by its prefix on another one. It waits for the link to
        that if there is none yet: where it came from there would be room for it now."""
        if instance_id in self._home.links:
            self._resume(held, instance_id)
        elif self._home.set_aside(held):
            traveller = Traveller(held, instance_id, "")
            self.transit.wait(traveller)
            self._loop.call_later(self._wait_seconds, self._unclaimed, traveller)

    def _resume(self, held: Held, instance_id: str) -> None:
        taken = self._home.place_on(held, instance_id)
        self._metrics.moves.labels("by_prefix" if taken else "no_place").inc()

    def arrived(self, link: WorkLink) -> None:
        """There is a link to the instance now: claims what has been moved there, resumes what was handed on."""
        for traveller in self.transit.arrivals(link.instance_id):
            if traveller.migration_id:
                self._claim(link, traveller)
            elif _still_waits(traveller.held):
                self._home.put_back(traveller.held)
                self._resume(traveller.held, link.instance_id)

    def refused(self, held: Held, now: float) -> None:
        """The instance does not have the sample any more. That says nothing of what else it would take."""
        self._metrics.moves.labels("refused").inc()
        self._home.take_back(held, held.batch.lost(held.index, held.attempt, now), "claim_refused")

    def _claim(self, link: WorkLink, traveller: Traveller) -> None:
        held, handle = traveller.held, link.next_handle()
        link.claim(held, handle)
        self._metrics.running.labels(link.instance_id).set(len(link.held))
        running, wanted = self._home.running(held), _is_wanted(held)
        if running is not None and wanted:
            running.places[held.index] = (link, handle)
        if running is None or not wanted or held.batch.samples[held.index].cancelled:
            # Claimed all the same, so that it ends there at once.
            link.abort(handle)
            self._metrics.moves.labels("unwanted").inc()
            return
        self._metrics.moves.labels("claimed").inc()
        log.debug("claimed", batch=held.batch.key, sample=held.index, instance=link.instance_id)

    def _unclaimed(self, traveller: Traveller) -> None:
        held = traveller.held
        if not self.transit.leave(traveller):
            return
        if not traveller.migration_id:
            self._metrics.moves.labels("no_link").inc()
            if _still_waits(held):
                self._home.put_back(held)
        elif _is_wanted(held):
            self._metrics.moves.labels("no_link").inc()
            self._home.take_back(held, held.batch.lost(held.index, held.attempt, time.time()), "no_link")
            self._home.pump_soon()


def _is_wanted(held: Held) -> bool:
    """Whether this is the attempt that the sample's tokens are to come from."""
    sample = held.batch.samples[held.index]
    return sample.phase is Phase.ASSIGNED and sample.attempt == held.attempt


def _still_waits(held: Held) -> bool:
    """Whether a sample that was set aside has neither ended nor been given to an instance since."""
    sample = held.batch.samples[held.index]
    return sample.phase is Phase.WAITING and sample.attempt == held.attempt
