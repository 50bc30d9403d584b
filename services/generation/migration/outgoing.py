"""The donor's half of a port: sends the KV of samples, in threads."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from services.generation.migration.framing import MOST_TEXT, BadFrame, Frame, Hello, Kind, running_crc
from services.generation.migration.reason import NotMoved, Reason
from services.generation.migration.store import KvStore
from services.generation.migration.transport import Link

# What a receiver says when it goes is here with the news that it has gone.
_LAST_WORDS_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a sample's KV: `tokens` tokens from `begin` on, which begins a block; they lie in these blocks.

    `drafters`, where there are any, go ahead of it.
    """

    begin: int
    tokens: int
    blocks: tuple[int, ...]
    drafters: bytes = b""


@dataclass(frozen=True, slots=True)
class Sent:
    """What of a sample has arrived: bytes in all, and the running CRC of their frames."""

    nbytes: int
    crc: int


@dataclass(slots=True)
class _Outgoing:
    """A sample that is being sent."""

    address: str
    hello: Hello
    deadline: float
    link: Link | None = None
    buffer: torch.Tensor | None = None
    nbytes: int = 0
    crc: int = 0
    closed: bool = False


class KvSender:
    """Samples that are being sent. Calls come from any thread and return at once."""

    def __init__(
        self, store: KvStore, rank: int, chunk_blocks: int, senders: int, dial: Callable[[str, float], Link]
    ) -> None:
        """
        Args:
            store: the KV.
            rank: of this worker.
            chunk_blocks: blocks in one frame; a buffer of that size is kept for each sample under way.
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
        """End all that is under way."""
        for migration_id in list(self._outgoing):
            self.end(migration_id)
        self._senders.shutdown(wait=False, cancel_futures=True)

    def send(
        self, migration_id: str, addresses: Sequence[str], token: bytes, seconds: float, part: Part
    ) -> Future[Sent]:
        """Send a part of a sample; resolves when the receiver says that all so far is in place.

        The first part opens the connection, to this rank's address, and sets until when there is time. NotMoved
        when it fails; then the sample's other parts fail as well.
        """
        outgoing = self._outgoing.get(migration_id)
        if outgoing is None:
            hello = Hello(migration_id, self._rank, token)
            outgoing = _Outgoing(addresses[self._rank], hello, time.monotonic() + seconds)
            self._outgoing[migration_id] = outgoing
        return self._senders.submit(self._send, outgoing, part)

    def end(self, migration_id: str) -> None:
        """Close the connection of a sample that was sent, or is not to be sent any more. Unknown ones are fine."""
        outgoing = self._outgoing.pop(migration_id, None)
        if outgoing is None:
            return
        outgoing.closed = True
        if outgoing.link is not None:
            outgoing.link.close()

    def _send(self, outgoing: _Outgoing, part: Part) -> Sent:
        try:
            # Thread-local, and the caches are tensors of inference.
            with torch.inference_mode():
                return self._send_part(outgoing, part)
        except TimeoutError as error:
            raise NotMoved(Reason.DEADLINE, f"sending KV stalled: {error}") from error
        except (OSError, BadFrame) as error:
            if outgoing.link is not None and not outgoing.closed:
                _last_words(outgoing.link)
            raise NotMoved(Reason.CONNECTION, f"sending KV failed: {error}") from error

    def _send_part(self, outgoing: _Outgoing, part: Part) -> Sent:
        link = self._link(outgoing)
        # The receiver gets them with the commit as well: ahead of it is only sooner.
        if 0 < len(part.drafters) <= MOST_TEXT:
            crc = zlib.crc32(part.drafters)
            link.send(Frame(Kind.DRAFTERS, crc=crc, length=len(part.drafters)), part.drafters)
        size, chunk = self._store.geometry.block_size, self._chunk_blocks
        for first in range(0, len(part.blocks), chunk):
            blocks = part.blocks[first : first + chunk]
            tokens = min(part.tokens - first * size, len(blocks) * size)
            if outgoing.buffer is None:
                outgoing.buffer = self._store.buffer(chunk)
            payload = self._store.gather(blocks, outgoing.buffer)
            crc = zlib.crc32(payload)
            link.send(Frame(Kind.KV, part.begin + first * size, tokens, crc, len(payload)), payload)
            outgoing.nbytes += len(payload)
            outgoing.crc = running_crc(outgoing.crc, crc)
        link.send(Frame(Kind.END))
        _check_answer(link, outgoing.crc)
        return Sent(outgoing.nbytes, outgoing.crc)

    def _link(self, outgoing: _Outgoing) -> Link:
        if outgoing.link is None:
            link = self._dial(outgoing.address, outgoing.deadline)
            outgoing.link = link
            hello = outgoing.hello.encode()
            link.send(Frame(Kind.HELLO, crc=zlib.crc32(hello), length=len(hello)), hello)
        if outgoing.closed:
            outgoing.link.close()
            raise ConnectionError("the move was given up")
        return outgoing.link


def _check_answer(link: Link, crc: int) -> None:
    """Wait for an ANSWER. NotMoved unless it confirms what was sent."""
    frame = link.receive()
    if frame.kind is not Kind.ANSWER:
        raise BadFrame(f"{frame.kind.name} is no answer")
    message = bytearray(frame.length)
    link.receive_into(memoryview(message))
    if frame.begin:
        raise NotMoved(Reason.of(frame.begin), message.decode(errors="replace"))
    if frame.crc != crc:
        raise NotMoved(Reason.CHECKSUM, "the receiver has other KV than was sent")


def _last_words(link: Link) -> None:
    """After sending has failed: NotMoved if the receiver has said why it went."""
    link.deadline = min(link.deadline, time.monotonic() + _LAST_WORDS_SECONDS)
    try:
        _check_answer(link, 0)
    except (OSError, BadFrame):
        return
