"""The port of one rank: sends KV of the rank to the same rank of another instance, and receives it, in threads.

Lives in the worker that has the KV. It is told what to do between two steps of the engine, and does it beside the
steps. Nothing here decides anything about a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from services.generation.migration.incoming import KvReceiver
from services.generation.migration.nixl import Agent, NixlLink
from services.generation.migration.outgoing import KvSender, Part, Sent
from services.generation.migration.reason import NotMoved, Reason
from services.generation.migration.store import KvStore
from services.generation.migration.transport import Link, Listener, TcpLink, dial
from services.platform.config import TlsConfig


class KvPort:
    """See `KvSender` and `KvReceiver`."""

    def __init__(
        self, store: KvStore, rank: int, *, chunk_bytes: int, senders: int, agent: Agent | None = None
    ) -> None:
        """
        Args:
            store: the KV.
            rank: of this worker.
            chunk_bytes: of KV in one frame, about.
            senders: samples that are sent at once.
            agent: of NIXL, if KV is to go by it rather than by TCP.
        """
        chunk_blocks = max(1, chunk_bytes // store.geometry.block_bytes)
        self._rank = rank
        self._sender = KvSender(store, rank, chunk_blocks, senders, self._dial)
        self._receiver = KvReceiver(store, rank, chunk_blocks)
        self._agent = agent
        self._tls: TlsConfig | None = None
        self._listener: Listener | None = None

    @property
    def on_drafters(self) -> Callable[[str, bytes], None] | None:
        """See `KvReceiver`."""
        return self._receiver.on_drafters

    @on_drafters.setter
    def on_drafters(self, told: Callable[[str, bytes], None]) -> None:
        self._receiver.on_drafters = told

    def listen(self, host: str, port: int, tls: TlsConfig | None) -> int:
        """Take connections; the port. OSError when it is taken."""
        self._tls = tls
        self._listener = Listener(host, port + self._rank if port else 0, tls, self._serve)
        return self._listener.port

    def close(self) -> None:
        """End all that is under way."""
        if self._listener is not None:
            self._listener.close()
        self._sender.close()
        self._receiver.close()

    def send(
        self, migration_id: str, addresses: Sequence[str], token: bytes, seconds: float, part: Part
    ) -> Future[Sent]:
        """See `KvSender`."""
        return self._sender.send(migration_id, addresses, token, seconds, part)

    def end(self, migration_id: str) -> None:
        """See `KvSender`."""
        self._sender.end(migration_id)

    def expect(
        self, migration_id: str, token: bytes, blocks: Sequence[int], tokens: int, seconds: float
    ) -> None:
        """See `KvReceiver`."""
        self._receiver.expect(migration_id, token, blocks, tokens, seconds)

    def received(self, migration_id: str) -> tuple[int, int]:
        """See `KvReceiver`."""
        return self._receiver.received(migration_id)

    def failures(self) -> dict[str, NotMoved]:
        """See `KvReceiver`."""
        return self._receiver.failures()

    def drop(self, migration_id: str, reason: Reason | None = None) -> None:
        """See `KvReceiver`."""
        self._receiver.drop(migration_id, reason)

    def _dial(self, address: str, deadline: float) -> Link:
        return self._kind_of(dial(address, self._tls, deadline))

    def _serve(self, connection: TcpLink) -> None:
        link = self._kind_of(connection)
        try:
            self._receiver.serve(link)
        finally:
            link.close()

    def _kind_of(self, link: TcpLink) -> Link:
        """The link that KV takes."""
        return link if self._agent is None else NixlLink(link, self._agent)
