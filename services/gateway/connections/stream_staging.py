"""Staging of weights that are pushed to the first instance and go on from one to the next."""

from collections.abc import Sequence

from paceline.internal.v1 import weight_peer_pb2
from paceline.v1 import weight_pb2
from services.gateway.connections.connection import Connection
from services.gateway.connections.instance_staging import InstanceStaging
from services.gateway.dispatch.turns import Pace
from services.gateway.fleet.health import MemberState
from services.gateway.fleet.stream_chain import ChainLink, chain, predecessors
from services.gateway.fleet.update_book import WeightUpdate


class StreamStaging(InstanceStaging):
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
        sources = {
            by_id[link.instance_id]: weight_peer_pb2.PeerWeights(
                update_id=update.update_id,
                ticket=update.ticket,
                peers=predecessors(order, place),
                has_successor=place + 1 < len(order),
                collective=rendezvous,
            )
            for place, link in enumerate(order)
        }
        super().__init__(update.version, sources, pace)

    def target(self) -> weight_pb2.StreamTarget:
        """Return the first instance that lives and has not failed. ServiceError as `taking_part`."""
        first = self.taking_part()[0]
        return weight_pb2.StreamTarget(
            instance_id=first.instance_id, address=first.member.record.address, ticket=self._ticket
        )
