"""Staging of weights that are pushed to the first instance and go on from one to the next."""

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from paceline.internal.v1 import weight_peer_pb2
from paceline.v1 import weight_pb2
from services.contracts.errors import Unavailable
from services.gateway.connections.connection import Connection, InstanceCall, InstanceResult, attempt, failed
from services.gateway.dispatch.turns import Pace
from services.gateway.fleet.health import MemberState
from services.gateway.fleet.stream_chain import ChainLink, chain, predecessors
from services.gateway.fleet.update_book import WeightUpdate


class StreamStaging:
    """The instances of one update, which receive and stage its weights from the start on."""

    def __init__(
        self,
        update: WeightUpdate,
        connections: Sequence[Connection],
        pace: Pace,
        rendezvous: weight_pb2.CollectiveRendezvous | None = None,
    ) -> None:
        """Have instances receive from one another; with a `rendezvous`, from the broadcast there."""
        self.update_id = update.update_id
        self.rendezvous = rendezvous
        self._ticket = update.ticket
        by_id = {each.instance_id: each for each in connections}
        order = chain(
            ChainLink(each.instance_id, each.member.record.address, each.member.state is MemberState.STALE)
            for each in connections
        )
        self._tasks: dict[Connection, asyncio.Task[InstanceResult]] = {}
        for place, link in enumerate(order):
            source = weight_peer_pb2.PeerWeights(
                update_id=update.update_id,
                ticket=update.ticket,
                peers=predecessors(order, place),
                has_successor=place + 1 < len(order),
                collective=rendezvous,
            )
            connection = by_id[link.instance_id]
            self._tasks[connection] = asyncio.create_task(
                attempt(connection, _stage(update.version, source), pace), name=f"stage-{link.instance_id}"
            )

    @property
    def running(self) -> bool:
        """True while an instance receives."""
        return any(not task.done() for task in self._tasks.values())

    def target(self) -> weight_pb2.StreamTarget:
        """Return the first instance that lives and has not failed.

        ServiceError: there is none, for the reason of the one that failed last.
        """
        first = self.taking_part()[0]
        return weight_pb2.StreamTarget(
            instance_id=first.instance_id, address=first.member.record.address, ticket=self._ticket
        )

    def taking_part(self) -> list[Connection]:
        """Return the instances that live and have not failed, at least one.

        ServiceError: there is none, for the reason of the one that failed last.
        """
        living = [
            connection
            for connection, task in self._tasks.items()
            if not connection.gone.is_set() and not (task.done() and task.result().error)
        ]
        if living:
            return living
        for task in reversed(self._tasks.values()):
            if task.done() and (error := task.result().error):
                raise error
        raise Unavailable("every instance that the weights were pushed to is gone", retry_after=2.0)

    async def results(self, left_out: Mapping[str, str] = MappingProxyType({})) -> list[InstanceResult]:
        """Return what came of it on each instance, once all are done but those `left_out`, for a reason each."""
        waited_for = [
            task
            for connection, task in self._tasks.items()
            if task.done() or connection.instance_id not in left_out
        ]
        found = dict(zip(waited_for, await asyncio.gather(*waited_for), strict=True))
        return [
            found[task]
            if task in found
            else failed(
                connection, Unavailable(f"left out of the broadcast: {left_out[connection.instance_id]}")
            )
            for connection, task in self._tasks.items()
        ]

    def end(self) -> None:
        """Wait for no instance any more."""
        for task in self._tasks.values():
            task.cancel()


def _stage(version: int, source: weight_peer_pb2.PeerWeights) -> InstanceCall:
    return lambda connection: connection.stage(version, source)
