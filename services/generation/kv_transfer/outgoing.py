"""Send the KV of samples, in a pool of threads."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from services.generation.kv_transfer.block_store import KvStore
from services.generation.kv_transfer.framing import MOST_TEXT, BadFrame, Frame, FrameKind, Hello, running_crc
from services.generation.kv_transfer.reason import NotMoved, Reason
from services.generation.kv_transfer.transport import KvLink

# Seconds to wait for a receiver's reason after its connection failed; it is usually there already.
_REASON_SECONDS = 0.1


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
    """KV of a sample that has arrived so far: bytes, and the running CRC of their frames."""

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
    """Sender of samples. Safe for threads; calls return at once."""

    def __init__(
        self, store: KvStore, rank: int, chunk_blocks: int, senders: int, dial: Callable[[str, float], KvLink]
    ) -> None:
        """Send from a store.

        Args:
            store: KV of this rank.
            rank: rank of this worker.
            chunk_blocks: blocks per frame; each sample under way keeps a buffer of that size.
            senders: samples that are sent at once.
            dial: connects to an address by a deadline; OSError when that fails.
        """
        self._store = store
        self._rank = rank
        self._chunk_blocks = chunk_blocks
        self._dial = dial
        self._outgoing: dict[str, _Outgoing] = {}
        self._senders = ThreadPoolExecutor(senders, thread_name_prefix="kv-sender")

    def close(self) -> None:
        """End everything that is under way."""
        for migration_id in list(self._outgoing):
            self.end(migration_id)
        self._senders.shutdown(wait=False, cancel_futures=True)

    def send(
        self, migration_id: str, addresses: Sequence[str], token: bytes, seconds: float, part: KvPart
    ) -> Future[KvSent]:
        """Send a part of a sample; resolves when the receiver confirms everything so far.

        The first part connects to this rank's address, and sets the deadline. Resolves with NotMoved on failure;
        the sample's later parts fail as well then.
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
        # The commit carries them as well; here they only arrive sooner.
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
        raise BadFrame(f"{frame.kind.name} is no answer")
    message = bytearray(frame.length)
    link.receive_into(memoryview(message))
    if frame.begin:
        raise NotMoved(Reason.of(frame.begin), message.decode(errors="replace"))
    if frame.crc != crc:
        raise NotMoved(Reason.CHECKSUM, "the receiver has other KV than was sent")


def _raise_reason(link: KvLink) -> None:
    """Raise NotMoved if the receiver said why it closed the connection; called after sending failed."""
    link.deadline = min(link.deadline, time.monotonic() + _REASON_SECONDS)
    try:
        _check_answer(link, 0)
    except (OSError, BadFrame):
        return
