"""Staging of weights that are pushed to the first instance and go on from one to the next."""

import asyncio
from collections.abc import Sequence

from paceline.internal.v1 import weight_peer_pb2
from paceline.v1 import weight_pb2
from services.contracts.errors import Unavailable
from services.gateway.connections.connection import Connection, InstanceCall, InstanceResult, attempt
from services.gateway.dispatch.turns import Pace
from services.gateway.fleet.health import MemberState
from services.gateway.fleet.stream_chain import ChainLink, chain, predecessors
from services.gateway.fleet.update_book import WeightUpdate


class StreamStaging:
    """The instances of one update, which receive and stage its weights from the start on."""

    def __init__(self, update: WeightUpdate, connections: Sequence[Connection], pace: Pace) -> None:
        self.update_id = update.update_id
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
        for connection, task in self._tasks.items():
            if not connection.gone.is_set() and not (task.done() and task.result().error):
                return weight_pb2.StreamTarget(
                    instance_id=connection.instance_id,
                    address=connection.member.record.address,
                    ticket=self._ticket,
                )
        for task in reversed(self._tasks.values()):
            if task.done() and (error := task.result().error):
                raise error
        raise Unavailable("every instance that the weights were pushed to is gone", retry_after=2.0)

    async def results(self) -> list[InstanceResult]:
        """Return what came of it on each instance, once all are done."""
        return await asyncio.gather(*self._tasks.values())

    def end(self) -> None:
        """Wait for no instance any more."""
        for task in self._tasks.values():
            task.cancel()


def _stage(version: int, source: weight_peer_pb2.PeerWeights) -> InstanceCall:
    return lambda connection: connection.stage(version, source)
