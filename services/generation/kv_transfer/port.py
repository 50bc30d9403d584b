"""Port of one rank: sends KV of the rank to the same rank of another instance, and receives it, in threads.

Lives in the worker that holds the KV. It is called between two steps of the engine, and works while steps run.
Nothing here decides about a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.generation.kv_transfer.block_store import KvStore
from services.generation.kv_transfer.incoming import KvReceiver
from services.generation.kv_transfer.listener import CONNECTIONS, Listener
from services.generation.kv_transfer.nixl import NixlLink
from services.generation.kv_transfer.outgoing import KvSender
from services.generation.kv_transfer.transport import KvLink, TcpLink, dial
from services.platform.config.settings import TlsConfig


class KvPort:
    """Sender and receiver of one rank, and the listener for its peers."""

    def __init__(
        self, store: KvStore, rank: int, *, chunk_bytes: int, senders: int, agent: Any = None
    ) -> None:
        """Create a port that does not listen yet.

        Args:
            store: KV of this rank.
            rank: rank of this worker.
            chunk_bytes: approximate bytes of KV per frame.
            senders: samples that are sent at once.
            agent: NIXL agent that carries KV; None for TCP.
        """
        chunk_blocks = max(1, chunk_bytes // store.geometry.block_bytes)
        self._rank = rank
        self._sender = sender = KvSender(store, rank, chunk_blocks, senders, self._dial)
        self._receiver = receiver = KvReceiver(store, rank, chunk_blocks)
        self.send, self.end = sender.send, sender.end
        self.expect, self.received = receiver.expect, receiver.received
        self.failures, self.drop = receiver.failures, receiver.drop
        self._agent = agent
        self._tls: TlsConfig | None = None
        self._listener: Listener | None = None

    def on_drafters(self, callback: Callable[[str, bytes], None]) -> None:
        """Call back with migration id and drafter state as soon as they arrive, in the connection's thread."""
        self._receiver.on_drafters = callback

    def listen(self, host: str, port: int, tls: TlsConfig | None, connections: int = CONNECTIONS) -> int:
        """Accept so many connections at once; returns the port. OSError when it is taken."""
        self._tls = tls
        own = port + self._rank if port else 0
        self._listener = Listener(host, own, tls, self._serve, limit=connections)
        return self._listener.port

    def close(self) -> None:
        """End everything that is under way."""
        if self._listener is not None:
            self._listener.close()
        self._sender.close()
        self._receiver.close()

    def _dial(self, address: str, deadline: float) -> KvLink:
        return self._carrier(dial(address, self._tls, deadline))

    def _serve(self, connection: TcpLink) -> None:
        link = self._carrier(connection)
        try:
            self._receiver.serve(link)
        finally:
            link.close()

    def _carrier(self, link: TcpLink) -> KvLink:
        """Return the link that carries KV."""
        return link if self._agent is None else NixlLink(link, self._agent)
