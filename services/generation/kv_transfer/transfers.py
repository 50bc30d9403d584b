"""Send and receive the KV of samples, in threads.

The sender packs blocks and sends them in a pool of threads. The receiver has a thread for each connection, which
writes arriving KV into reserved blocks until the sample is dropped. Both ends compare the CRC of all KV sent.
"""

from __future__ import annotations

import hmac
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import structlog
import torch

from services.generation.kv_transfer.block_store import KvStore
from services.generation.kv_transfer.links import (
    MOST_TEXT,
    BadFrame,
    Frame,
    FrameKind,
    Hello,
    KvLink,
    answer,
    running_crc,
)
from services.generation.kv_transfer.reason import NotMoved, Reason

_log = structlog.get_logger(__name__)
# Longest accepted HELLO in bytes; donors send shorter ones.
_MOST_HELLO = 4096
# Seconds to wait for a receiver's reason after its connection failed; it has usually arrived by then.
_REASON_SECONDS = 0.1


@dataclass(slots=True)
class _Incoming:
    """Sample that is being received into reserved blocks. Hold the lock to write to them."""

    token: bytes
    blocks: tuple[int, ...]
    deadline: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    link: KvLink | None = None
    # Tokens in place, from the start of the sample. The next part begins after them, or in the same block.
    tokens: int = 0
    crc: int = 0
    dropped: bool = False
    error: NotMoved | None = None


class KvReceiver:
    """Receiver of expected samples. Thread-safe; only `drop` may wait, until one frame is written."""

    def __init__(self, store: KvStore, rank: int, chunk_blocks: int) -> None:
        """Receive into a store.

        Args:
            store: KV of this rank.
            rank: rank of this worker.
            chunk_blocks: expected blocks per frame; each connection keeps a buffer of that size.
        """
        self._store = store
        self._rank = rank
        self._chunk_blocks = chunk_blocks
        self._incoming: dict[str, _Incoming] = {}
        self._lock = threading.Lock()
        # Called in the connection's thread with the state of a sample's drafters, as soon as it arrives.
        self.on_drafters: Callable[[str, bytes], None] | None = None

    def close(self) -> None:
        """Drop all expected samples."""
        for migration_id in list(self._incoming):
            self.drop(migration_id, Reason.WITHDRAWN)

    def expect(
        self, migration_id: str, token: bytes, blocks: Sequence[int], tokens: int, seconds: float
    ) -> None:
        """Expect a sample's KV in these blocks for `seconds`; the first `tokens` tokens have theirs already."""
        deadline = time.monotonic() + seconds
        self._incoming[migration_id] = _Incoming(token, tuple(blocks), deadline, tokens=tokens)

    def received(self, migration_id: str) -> tuple[int, int]:
        """Return the number of tokens in place, and the running CRC of their KV. NotMoved if the transfer ended."""
        incoming = self._incoming.get(migration_id)
        if incoming is None:
            raise NotMoved(Reason.WITHDRAWN, "the reservation was dropped")
        if incoming.error is not None:
            raise incoming.error
        return incoming.tokens, incoming.crc

    def failures(self) -> dict[str, NotMoved]:
        """Return the errors of samples whose connection ended too early, by migration id."""
        return {
            migration_id: each.error
            for migration_id, each in list(self._incoming.items())
            if each.error is not None
        }

    def drop(self, migration_id: str, reason: Reason | None = None) -> None:
        """Stop receiving a sample. Nothing writes to its blocks after this has returned.

        The reason is sent to the donor; None means that the sample has arrived and nothing is sent.
        """
        incoming = self._incoming.pop(migration_id, None)
        if incoming is None:
            return
        with incoming.lock:
            incoming.dropped = True
            link = incoming.link
        if link is None:
            return
        if reason is not None:
            _send_reason(link, reason, "the receiver dropped the reservation")
        link.close()

    def serve(self, link: KvLink) -> None:
        """Serve one connection, from its HELLO to its end.

        OSError or BadFrame if it ends before its sample is known.
        """
        incoming, migration_id = self._admit(link)
        try:
            with torch.inference_mode():
                self._receive(link, incoming, migration_id)
        except NotMoved as error:
            incoming.error = error
            _send_reason(link, error.reason, error.message)
            link.drain()
        except (OSError, BadFrame) as error:
            incoming.error = NotMoved(Reason.CONNECTION, f"receiving KV failed: {error}")
            if isinstance(error, BadFrame):
                _send_reason(link, Reason.CONNECTION, str(error))
                link.drain()
        except Exception as error:
            _log.exception("kv_receiver_failed", migration=migration_id)
            incoming.error = NotMoved(Reason.INTERNAL, repr(error))
            _send_reason(link, Reason.INTERNAL, repr(error))
            link.drain()

    def _admit(self, link: KvLink) -> tuple[_Incoming, str]:
        """Return the sample of a connection, and its migration id. BadFrame, with no answer, if there is none."""
        frame = link.receive()
        if frame.kind is not FrameKind.HELLO or frame.length > _MOST_HELLO:
            raise BadFrame("a connection must begin with HELLO")
        hello = Hello.decode(_text(link, frame))
        incoming = self._incoming.get(hello.migration_id)
        # A token is compared for an unknown sample, too, so that timing reveals nothing.
        known = incoming.token if incoming is not None else b""
        if incoming is None or not hmac.compare_digest(hello.token, known) or hello.rank != self._rank:
            raise BadFrame("no sample is expected under this name and token")
        with self._lock:
            if incoming.link is not None:
                raise BadFrame("the token was used already")
            incoming.link = link
        link.identified(incoming.deadline)
        return incoming, hello.migration_id

    def _receive(self, link: KvLink, incoming: _Incoming, migration_id: str) -> None:
        buffer = self._store.buffer(self._chunk_blocks)
        while True:
            frame = link.receive()
            if frame.kind is FrameKind.KV:
                buffer = self._receive_kv(link, incoming, frame, buffer)
            elif frame.kind is FrameKind.DRAFTERS:
                states = _text(link, frame)
                if self.on_drafters is not None:
                    self.on_drafters(migration_id, states)
            elif frame.kind is FrameKind.END:
                link.send(*answer(crc=incoming.crc))
            else:
                raise BadFrame(f"{frame.kind.name} is not for a receiver")

    def _receive_kv(
        self, link: KvLink, incoming: _Incoming, frame: Frame, buffer: torch.Tensor
    ) -> torch.Tensor:
        """Receive one frame of KV into its blocks; returns the buffer for the next one."""
        size = self._store.geometry.block_size
        first, count = frame.begin // size, -(-frame.count // size)
        blocks = incoming.blocks[first : first + count]
        whole = incoming.tokens // size * size
        if frame.begin != whole or frame.count < 1 or len(blocks) != count:
            raise BadFrame(f"{frame.count} tokens from {frame.begin} on do not follow {incoming.tokens}")
        if frame.length != self._store.nbytes(count):
            raise BadFrame(f"{frame.length} bytes for {frame.count} tokens")
        if frame.length > buffer.nbytes:
            # The donor's frames may be larger than ours, but never larger than the reservation.
            buffer = self._store.buffer(count)
        payload = self._store.view(buffer, count)
        link.receive_into(payload)
        if zlib.crc32(payload) != frame.crc:
            raise NotMoved(Reason.CHECKSUM, f"the KV from token {frame.begin} on arrived corrupted")
        with incoming.lock:
            if incoming.dropped:
                raise ConnectionError("the reservation was dropped")
            self._store.scatter(blocks, buffer)
        incoming.tokens = frame.begin + frame.count
        incoming.crc = running_crc(incoming.crc, frame.crc)
        return buffer


def _text(link: KvLink, frame: Frame) -> bytes:
    """Receive the payload of a frame that is not KV."""
    data = bytearray(frame.length)
    link.receive_into(memoryview(data))
    if zlib.crc32(data) != frame.crc:
        raise BadFrame(f"{frame.kind.name} arrived corrupted")
    return bytes(data)


def _send_reason(link: KvLink, reason: Reason, message: str) -> None:
    """Send the reason why the transfer has ended to the donor, if it is still connected."""
    try:
        link.send(*answer(reason.value, message=message))
    except OSError:
        return


@dataclass(frozen=True, slots=True)
class KvPart:
    """Part of a sample's KV: `tokens` tokens from `begin`, which starts a block, and the blocks that hold them.

    `drafters` is the state of the sample's drafters, sent ahead of the KV; empty for none.
    """

    begin: int
    tokens: int
    blocks: tuple[int, ...]
    drafters: bytes = b""


@dataclass(frozen=True, slots=True)
class KvSent:
    """KV of a sample that has arrived so far: its bytes, and the running CRC of its frames."""

    nbytes: int
    crc: int


@dataclass(slots=True)
class _Outgoing:
    """Sample that is being sent."""

    address: str
    hello: Hello
    deadline: float
    link: KvLink | None = None
    buffer: torch.Tensor | None = None
    nbytes: int = 0
    crc: int = 0
    closed: bool = False


class KvSender:
    """Sender of samples. Thread-safe; calls return at once."""

    def __init__(
        self, store: KvStore, rank: int, chunk_blocks: int, senders: int, dial: Callable[[str, float], KvLink]
    ) -> None:
        """Send from a store.

        Args:
            store: KV of this rank.
            rank: rank of this worker.
            chunk_blocks: blocks per frame; each sample that is being sent keeps a buffer of that size.
            senders: samples that are sent at once.
            dial: connects to an address by a deadline; OSError if that fails.
        """
        self._store = store
        self._rank = rank
        self._chunk_blocks = chunk_blocks
        self._dial = dial
        self._outgoing: dict[str, _Outgoing] = {}
        self._senders = ThreadPoolExecutor(senders, thread_name_prefix="kv-sender")

    def close(self) -> None:
        """End all transfers."""
        for migration_id in list(self._outgoing):
            self.end(migration_id)
        self._senders.shutdown(wait=False, cancel_futures=True)

    def send(
        self, migration_id: str, addresses: Sequence[str], token: bytes, seconds: float, part: KvPart
    ) -> Future[KvSent]:
        """Send a part of a sample; resolves when the receiver confirms everything so far.

        The first part connects to this rank's address, and sets the deadline. Resolves with NotMoved on failure,
        after which the sample's later parts fail, too.
        """
        outgoing = self._outgoing.get(migration_id)
        if outgoing is None:
            hello = Hello(migration_id, self._rank, token)
            outgoing = _Outgoing(addresses[self._rank], hello, time.monotonic() + seconds)
            self._outgoing[migration_id] = outgoing
        return self._senders.submit(self._send, outgoing, part)

    def end(self, migration_id: str) -> None:
        """Close the connection of a sample. Unknown ones are ignored."""
        outgoing = self._outgoing.pop(migration_id, None)
        if outgoing is None:
            return
        outgoing.closed = True
        if outgoing.link is not None:
            outgoing.link.close()

    def _send(self, outgoing: _Outgoing, part: KvPart) -> KvSent:
        try:
            # The mode is thread-local, and the caches are inference tensors.
            with torch.inference_mode():
                return self._send_part(outgoing, part)
        except TimeoutError as error:
            raise NotMoved(Reason.DEADLINE, f"sending KV stalled: {error}") from error
        except (OSError, BadFrame) as error:
            if outgoing.link is not None and not outgoing.closed:
                _raise_reason(outgoing.link)
            raise NotMoved(Reason.CONNECTION, f"sending KV failed: {error}") from error

    def _send_part(self, outgoing: _Outgoing, part: KvPart) -> KvSent:
        link = self._link(outgoing)
        # The commit has them, too; here they arrive earlier.
        if 0 < len(part.drafters) <= MOST_TEXT:
            crc = zlib.crc32(part.drafters)
            link.send(Frame(FrameKind.DRAFTERS, crc=crc, length=len(part.drafters)), part.drafters)
        size, chunk = self._store.geometry.block_size, self._chunk_blocks
        for first in range(0, len(part.blocks), chunk):
            blocks = part.blocks[first : first + chunk]
            tokens = min(part.tokens - first * size, len(blocks) * size)
            if outgoing.buffer is None:
                outgoing.buffer = self._store.buffer(chunk)
            payload = self._store.gather(blocks, outgoing.buffer)
            crc = zlib.crc32(payload)
            link.send(Frame(FrameKind.KV, part.begin + first * size, tokens, crc, len(payload)), payload)
            outgoing.nbytes += len(payload)
            outgoing.crc = running_crc(outgoing.crc, crc)
        link.send(Frame(FrameKind.END))
        _check_answer(link, outgoing.crc)
        return KvSent(outgoing.nbytes, outgoing.crc)

    def _link(self, outgoing: _Outgoing) -> KvLink:
        if outgoing.link is None:
            link = self._dial(outgoing.address, outgoing.deadline)
            outgoing.link = link
            hello = outgoing.hello.encode()
            link.send(Frame(FrameKind.HELLO, crc=zlib.crc32(hello), length=len(hello)), hello)
        if outgoing.closed:
            outgoing.link.close()
            raise ConnectionError("the move was given up")
        return outgoing.link


def _check_answer(link: KvLink, crc: int) -> None:
    """Wait for an ANSWER. NotMoved unless it confirms what was sent."""
    frame = link.receive()
    if frame.kind is not FrameKind.ANSWER:
        raise BadFrame(f"{frame.kind.name} is not an answer")
    message = bytearray(frame.length)
    link.receive_into(memoryview(message))
    if frame.begin:
        raise NotMoved(Reason.of(frame.begin), message.decode(errors="replace"))
    if frame.crc != crc:
        raise NotMoved(Reason.CHECKSUM, "the receiver has different KV than was sent")


def _raise_reason(link: KvLink) -> None:
    """Raise NotMoved if the receiver sent a reason before it closed the connection; called after sending failed."""
    link.deadline = min(link.deadline, time.monotonic() + _REASON_SECONDS)
    try:
        _check_answer(link, 0)
    except (OSError, BadFrame):
        return
