"""Samples that are unfinished when weights change: they keep the update waiting, are ended, or go on."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.gateway.dispatch.dispatcher import Dispatcher
from services.gateway.fleet.update_book import InFlightTreatment, UpdateBook
from services.gateway.metrics import GatewayMetrics


@dataclass(eq=False)
class InFlightSamples:
    """Unfinished samples of all batches, as a weight update treats them."""

    book: UpdateBook
    dispatcher: Dispatcher
    metrics: GatewayMetrics

    def __post_init__(self) -> None:
        # A former gateway may have left an update half applied, which goes forward as soon as the term begins.
        self.dispatcher.placer.held = self.book.is_applying()

    @property
    def unfinished(self) -> int:
        """Number of samples that have not ended, and of those that are about to be accepted."""
        return self.dispatcher.batches.unfinished

    @contextmanager
    def held(self) -> Iterator[None]:
        """Place nothing while weights are applied: an instance may have either version."""
        placer = self.dispatcher.placer
        placer.held = True
        # The bubble coordinator must learn that nothing is to be pre-generated now.
        self.dispatcher.batches.progress.set()
        try:
            yield
        finally:
            placer.held = False
            placer.pump_soon()

    async def prepare(self, treatment: InFlightTreatment) -> tuple[int, int]:
        """Do what comes before weights are applied; return how many samples end (as ABORTED), and how many go on.

        Those that end do so when their instance has answered, which applies nothing before.
        """
        aborted = continued = 0
        if treatment is InFlightTreatment.ABORT:
            batches = list(self.dispatcher.batches.by_key.values())
            cancelling = [
                self.dispatcher.cancel(running, range(len(running.batch.samples)), keep_partial=True)
                for running in batches
            ]
            aborted = sum(await asyncio.gather(*cancelling))
        elif treatment is InFlightTreatment.CONTINUE:
            continued = self.unfinished
        self.metrics.in_flight_samples.labels("aborted").inc(aborted)
        self.metrics.in_flight_samples.labels("continued").inc(continued)
        return aborted, continued

    def follow(self) -> None:
        """Let every batch go on under the published version, or end where its own is served no more."""
        for running in list(self.dispatcher.batches.by_key.values()):
            batch = running.batch
            self.dispatcher.go_on(running, self.book.version_for(batch.policy_version, batch.max_staleness))
