"""Weights that an instance receives, and weights that it serves to other instances."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from paceline.internal.v1 import weight_peer_pb2 as pb
from services.contracts.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unauthenticated,
    Unavailable,
)
from services.generation.config import GenerationConfig
from services.generation.weights.adoption import AdoptedWeights
from services.generation.weights.stream.metrics import WeightStreamMetrics
from services.generation.weights.stream.reception import Received, Reception, StreamLimits
from services.generation.weights.stream.stored_stream import StoredStream


class WeightStreams:
    """Receptions by update. Its methods run in the event loop."""

    def __init__(
        self,
        config: GenerationConfig,
        adopted: AdoptedWeights | None,
        dial: Callable[[str], grpc.aio.Channel],
        metrics: WeightStreamMetrics,
        *,
        most_bytes: int,
    ) -> None:
        """Receive into `adopted`; without it nothing can be received.

        `dial` opens a channel to a peer. The files of a version have at most `most_bytes`.
        """
        self.limits = StreamLimits(
            config.weight_piece_bytes, most_bytes, config.weight_stall_seconds, config.weight_idle_seconds
        )
        self.metrics = metrics
        self._owner = config.instance_id
        self._adopted = adopted
        self._dial = dial
        self._receptions: dict[str, Reception] = {}

    async def receive(self, version: int, order: pb.PeerWeights) -> Received:
        """Return the weights of a version once all have arrived; a repeated call continues the reception.

        Raises:
            FailedPrecondition: this instance has no folder for them.
            ServiceError: they cannot be received.
        """
        if self._adopted is None:
            text = (
                "adopted_weights is not set: this instance has no folder for weights that are pushed to it; "
            )
            text += "set it, or push by a WeightFolder"
            raise FailedPrecondition("NO_ADOPTED_WEIGHTS", text)
        if order.checksum and (found := self._adopted.held(version, order.checksum)):
            return Received(found, order.checksum, {})
        if not order.ticket and not order.peers:
            raise FailedPrecondition("NO_PEER", f"no instance has version {version}, which was pushed")
        reception = await self._reception(version, order, self._adopted)
        # It continues if this caller disconnects.
        try:
            received = await asyncio.shield(reception.done)
        except asyncio.CancelledError:
            if reception.done.cancelled():
                raise Unavailable("the update was given up") from None
            raise
        folder = await asyncio.to_thread(self._keep, reception, received, self._adopted)
        return Received(folder, received.checksum, received.contents)

    @contextmanager
    def judging(self, update_id: str) -> Iterator[None]:
        """Pass a refusal in the block on to instances that fetch the weights of the update from here."""
        try:
            yield
        except (InvalidArgument, DataLoss) as refusal:
            if reception := self._receptions.get(update_id):
                reception.refuse(refusal)
            raise

    async def end(self, version: int) -> None:
        """Give up receiving a version."""
        for update_id, reception in list(self._receptions.items()):
            if reception.version == version:
                del self._receptions[update_id]
                await reception.close()

    async def close(self) -> None:
        """Give up all receptions."""
        while self._receptions:
            await self._receptions.popitem()[1].close()

    def ticketed(self, ticket: str) -> Reception:
        """Return the reception that the bearer of a ticket may push to; Unauthenticated if there is none."""
        found = None
        for each in self._receptions.values():
            if each.ticket and hmac.compare_digest(each.ticket.encode(), ticket.encode()):
                found = each
        if found is None:
            raise Unauthenticated("the bearer token is no ticket of an update that is in progress here")
        return found

    async def wanted(self, request: pb.FetchWeightsRequest) -> tuple[StoredStream, Reception | None]:
        """Return the requested stream, and its reception while there is one.

        Raises:
            NotFound: there is no such stream.
            WeightsRefused: the weights were refused here.
        """
        reception = self._receptions.get(request.update_id)
        if reception is not None and reception.refused is not None:
            raise reception.refused
        if reception is not None and (reception.stream.whole or not reception.done.done()):
            return reception.stream, reception
        folder = self._adopted and self._adopted.held(request.policy_version, request.checksum)
        if folder:
            try:
                return await asyncio.to_thread(StoredStream.of_folder, folder), None
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                pass  # Files of other writers, which have no stream.
        raise NotFound("weights", f"version {request.policy_version}")

    async def _reception(self, version: int, order: pb.PeerWeights, adopted: AdoptedWeights) -> Reception:
        found = self._receptions.get(order.update_id)
        if found is not None and not found.failed:
            found.follow(order)
            return found
        # One update is in progress at a time; fetches of an earlier one read its folder.
        await self.close()
        folder = await asyncio.to_thread(adopted.receiving, self._owner)
        reception = Reception(order, version, folder, self._dial, self.limits, self.metrics)
        self._receptions[order.update_id] = reception
        return reception

    def _keep(self, reception: Reception, received: Received, adopted: AdoptedWeights) -> Path:
        place: Path = adopted.keep(received.folder, reception.version, received.checksum)
        reception.stream.folder = place
        return place
