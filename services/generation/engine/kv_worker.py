"""Worker side of migration: the port of its rank's KV."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from services.generation.kv_transfer.block_store import Geometry, KvStore
from services.generation.kv_transfer.nixl import make_agent
from services.generation.kv_transfer.port import KvPort
from services.generation.kv_transfer.reason import NotMoved


class KvWorkerMixin:
    """Mixin for vLLM's worker. The annotations name what it uses of the worker."""

    model_runner: Any
    rank: int
    _kv_port: KvPort
    _kv_sent: dict[str, Future[Any]]

    def open_kv_port(
        self, blocks: int, block_size: int, chunk_bytes: int, senders: int, agent: str
    ) -> Geometry:
        """Create the port of this rank (see `KvPort`); returns the geometry of its KV."""
        store = KvStore(self.model_runner.kv_caches, blocks, block_size)
        nixl = make_agent(f"{agent}/{self.rank}") if agent else None
        self._kv_port = KvPort(store, self.rank, chunk_bytes=chunk_bytes, senders=senders, agent=nixl)
        self._kv_sent = {}
        return store.geometry

    def own_kv_port(self) -> KvPort:
        """Return the port itself, for an engine in this process."""
        return self._kv_port

    def call_kv_port(self, method: str, *args: Any) -> Any:
        """Call a method of the port from another process. NotMoved is returned, not raised.

        `send` returns nothing here; `sent` returns its result, or None while it is under way.
        """
        try:
            if method == "send":
                self._kv_sent[args[0]] = self._kv_port.send(*args)
                return None
            if method == "sent":
                future = self._kv_sent[args[0]]
                return future.result() if future.done() else None
            if method == "end":
                self._kv_sent.pop(args[0], None)
            return getattr(self._kv_port, method)(*args)
        except NotMoved as error:
            return error
