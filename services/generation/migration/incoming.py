"""The receiver's half of a port: takes the KV of samples into their blocks, one thread a connection."""

from __future__ import annotations

import hmac
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog
import torch

from services.generation.migration.framing import BadFrame, Frame, Hello, Kind, running_crc
from services.generation.migration.reason import NotMoved, Reason
from services.generation.migration.store import KvStore
from services.generation.migration.transport import Link, answer

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Incoming:
    """A sample that is being received, into reserved blocks. Whoever writes to them holds the lock."""

    token: bytes
    blocks: tuple[int, ...]
    deadline: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    link: Link | None = None
    # Tokens from the start of the sample that are in place; the next part begins there, or in the same block.
    tokens: int = 0
    nbytes: int = 0
    crc: int = 0
    over: bool = False
    error: NotMoved | None = None


class KvReceiver:
    """Samples that are expected. Calls come from any thread; only `drop` may wait, for one frame to be put away."""

    def __init__(self, store: KvStore, rank: int, chunk_blocks: int) -> None:
        """
        Args:
            store: the KV.
            rank: of this worker.
            chunk_blocks: blocks that a frame is thought to have; a buffer of that size is kept for each connection.
        """
        self._store = store
        self._rank = rank
        self._chunk_blocks = chunk_blocks
        self._incoming: dict[str, _Incoming] = {}
        self._lock = threading.Lock()
        # Told what a sample's drafters know, as soon as it is here; called in the connection's thread.
        self.on_drafters: Callable[[str, bytes], None] | None = None

    def close(self) -> None:
        """End all that is under way."""
        for migration_id in list(self._incoming):
            self.drop(migration_id, Reason.WITHDRAWN)

    def expect(
        self, migration_id: str, token: bytes, blocks: Sequence[int], tokens: int, seconds: float
    ) -> None:
        """Take a sample's KV into these blocks, of which the first `tokens` tokens are there, for so long."""
        deadline = time.monotonic() + seconds
        self._incoming[migration_id] = _Incoming(token, tuple(blocks), deadline, tokens=tokens)

    def received(self, migration_id: str) -> tuple[int, int]:
        """Tokens of a sample that are in place, and the running CRC of what was sent. NotMoved when it is over."""
        incoming = self._incoming.get(migration_id)
        if incoming is None:
            raise NotMoved(Reason.WITHDRAWN, "the reservation was dropped")
        if incoming.error is not None:
            raise incoming.error
        return incoming.tokens, incoming.crc

    def failures(self) -> dict[str, NotMoved]:
        """The samples whose connection has ended before they were dropped or kept."""
        return {
            migration_id: each.error
            for migration_id, each in list(self._incoming.items())
            if each.error is not None
        }

    def drop(self, migration_id: str, reason: Reason | None = None) -> None:
        """Take nothing more for a sample. When it returns nothing writes to its blocks any more.

        The donor is told the reason; None: the sample is kept, and there is nothing to tell.
        """
        incoming = self._incoming.pop(migration_id, None)
        if incoming is None:
            return
        with incoming.lock:
            incoming.over = True
            link = incoming.link
        if link is None:
            return
        if reason is not None:
            _tell(link, reason, "the receiver dropped the reservation")
        link.close()

    def serve(self, link: Link) -> None:
        """One connection, from its HELLO to its end.

        OSError or BadFrame when it ends before it is known what it is for.
        """
        incoming, migration_id = self._admit(link)
        try:
            with torch.inference_mode():
                self._take(link, incoming, migration_id)
        except NotMoved as error:
            incoming.error = error
            _tell(link, error.reason, error.message)
            link.drain()
        except (OSError, BadFrame) as error:
            incoming.error = NotMoved(Reason.CONNECTION, f"receiving KV failed: {error}")
            if isinstance(error, BadFrame):
                _tell(link, Reason.CONNECTION, str(error))
                link.drain()
        except Exception as error:
            _log.exception("kv_receiver_failed", migration=migration_id)
            incoming.error = NotMoved(Reason.INTERNAL, repr(error))
            _tell(link, Reason.INTERNAL, repr(error))
            link.drain()

    def _admit(self, link: Link) -> tuple[_Incoming, str]:
        """The sample that a connection is for. BadFrame: it is for none, and gets no answer."""
        frame = link.receive()
        if frame.kind is not Kind.HELLO:
            raise BadFrame("a connection must begin with HELLO")
        hello = Hello.decode(_text(link, frame))
        incoming = self._incoming.get(hello.migration_id)
        # The token of a sample that is unknown is compared as well: how long it takes tells nothing.
        known = incoming.token if incoming is not None else b""
        if incoming is None or not hmac.compare_digest(hello.token, known) or hello.rank != self._rank:
            raise BadFrame("nobody is expected under this name and token")
        with self._lock:
            if incoming.link is not None:
                raise BadFrame("the token was used already")
            incoming.link = link
        link.deadline = incoming.deadline
        return incoming, hello.migration_id

    def _take(self, link: Link, incoming: _Incoming, migration_id: str) -> None:
        buffer = self._store.buffer(self._chunk_blocks)
        while True:
            frame = link.receive()
            if frame.kind is Kind.KV:
                buffer = self._take_kv(link, incoming, frame, buffer)
            elif frame.kind is Kind.DRAFTERS:
                states = _text(link, frame)
                if self.on_drafters is not None:
                    self.on_drafters(migration_id, states)
            elif frame.kind is Kind.END:
                link.send(*answer(crc=incoming.crc))
            else:
                raise BadFrame(f"{frame.kind.name} is not for a receiver")

    def _take_kv(self, link: Link, incoming: _Incoming, frame: Frame, buffer: torch.Tensor) -> torch.Tensor:
        """Receive one frame of KV into its blocks; the buffer for the next one."""
        size = self._store.geometry.block_size
        first, count = frame.begin // size, -(-frame.count // size)
        blocks = incoming.blocks[first : first + count]
        whole = incoming.tokens // size * size
        if frame.begin != whole or frame.count < 1 or len(blocks) != count:
            raise BadFrame(f"{frame.count} tokens from {frame.begin} on do not follow {incoming.tokens}")
        if frame.length != self._store.nbytes(count):
            raise BadFrame(f"{frame.length} bytes for {frame.count} tokens")
        if frame.length > buffer.nbytes:
            # The donor's frames are larger than ours would be; never than the reservation.
            buffer = self._store.buffer(count)
        payload = self._store.view(buffer, count)
        link.receive_into(payload)
        if zlib.crc32(payload) != frame.crc:
            raise NotMoved(Reason.CHECKSUM, f"the KV of tokens {frame.begin} on arrived broken")
        with incoming.lock:
            if incoming.over:
                raise ConnectionError("the reservation was dropped")
            self._store.scatter(blocks, buffer)
        incoming.tokens = frame.begin + frame.count
        incoming.nbytes += frame.length
        incoming.crc = running_crc(incoming.crc, frame.crc)
        return buffer


def _text(link: Link, frame: Frame) -> bytes:
    """The payload of a frame that is not KV."""
    data = bytearray(frame.length)
    link.receive_into(memoryview(data))
    if zlib.crc32(data) != frame.crc:
        raise BadFrame(f"a {frame.kind.name} that arrived broken")
    return bytes(data)


def _tell(link: Link, reason: Reason, message: str) -> None:
    """Tell the donor that it is over, if it still listens."""
    try:
        link.send(*answer(reason.value, message=message))
    except OSError:
        return
