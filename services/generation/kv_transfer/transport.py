"""Transport of KV: the interface of a link, and one TCP connection per migration and rank.

Bulk data does not go through gRPC, which copies it several times. Here the kernel reads the packed buffer
(`sendmsg` of a memoryview) and writes into the buffer that is unpacked (`recv_into`). TLS uses the certificates of
the services; OpenSSL copies once on each side.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from services.generation.kv_transfer.framing import HEADER_BYTES, Frame, FrameKind
from services.platform.config.settings import TlsConfig

# A peer that neither takes nor sends a byte for this many seconds is given up before the deadline of the move.
STALL_SECONDS = 5.0


class KvLink(Protocol):
    """Connection between two ports, used by one thread at a time.

    Every call raises OSError when the connection has ended or stalls within a frame, and BadFrame for bytes that
    are not of this protocol.
    """

    deadline: float
    """Deadline of everything that is sent and received, on the monotonic clock."""

    def identified(self, deadline: float) -> None:
        """Record that the peer is who it has to be, and may use the connection until this deadline."""

    def send(self, frame: Frame, payload: bytes | memoryview = b"") -> None:
        """Send a header and its payload. The caller may change the payload after this has returned."""

    def receive(self) -> Frame:
        """Return the next header."""

    def receive_into(self, payload: memoryview) -> None:
        """Receive the whole payload of the last header."""

    def drain(self) -> None:
        """Half-close, and read until the peer closes, which it does once it has read everything.

        Closing a connection with unread bytes would reset it, and discard what was sent. Waits at most as long as
        for a peer that stalls; a peer that does not close is no error.
        """

    def close(self) -> None:
        """Close the connection, from any thread: a thread that waits for it gets an OSError."""


class TcpLink:
    """Link over a connected socket."""

    def __init__(
        self, connection: socket.socket, deadline: float, on_identified: Callable[[], None] = lambda: None
    ) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._on_identified = on_identified
        self.deadline = deadline

    def identified(self, deadline: float) -> None:
        """As `KvLink`."""
        self.deadline = deadline
        self._on_identified()

    def send(self, frame: Frame, payload: bytes | memoryview = b"") -> None:
        """As `KvLink`. Header and payload go out together, without being joined."""
        self._set_timeout()
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.sendall(frame.encode())
            self._socket.sendall(payload)
            return
        parts = [memoryview(frame.encode()), memoryview(payload)]
        while parts:
            sent = self._socket.sendmsg(parts)
            self._set_timeout()
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]

    def receive(self) -> Frame:
        """As `KvLink`. A peer may take until the deadline before it begins a frame."""
        header = bytearray(HEADER_BYTES)
        self._fill(memoryview(header), self.deadline - time.monotonic())
        return Frame.decode(header)

    def receive_into(self, payload: memoryview) -> None:
        """As `KvLink`."""
        self._fill(payload, STALL_SECONDS)

    def _fill(self, payload: memoryview, patience: float) -> None:
        """Receive a whole payload; the first byte may take `patience` seconds."""
        while len(payload):
            self._set_timeout(patience)
            patience = STALL_SECONDS
            count = self._socket.recv_into(payload)
            if not count:
                raise ConnectionError("the peer closed the connection")
            payload = payload[count:]

    def drain(self) -> None:
        """As `KvLink`."""
        self.deadline = min(self.deadline, time.monotonic() + STALL_SECONDS)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._set_timeout()
            while self._socket.recv(1 << 16):
                self._set_timeout()

    def close(self) -> None:
        """As `KvLink`."""
        # Wakes a thread that is blocked in it; closing alone does not.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _set_timeout(self, patience: float = STALL_SECONDS) -> None:
        left = min(self.deadline - time.monotonic(), patience)
        if left <= 0:
            raise TimeoutError("the deadline is over")
        self._socket.settimeout(left)


def dial(address: str, tls: TlsConfig | None, deadline: float) -> TcpLink:
    """Connect to "host:port". OSError when that fails, also for a peer whose certificate is not trusted."""
    host, _, port = address.rpartition(":")
    timeout = min(max(deadline - time.monotonic(), 0.001), STALL_SECONDS)
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout)
    if tls is None:
        return TcpLink(connection, deadline)
    try:
        context = _client_context(tls)
        name = tls.server_name or host.strip("[]")
        return TcpLink(context.wrap_socket(connection, server_hostname=name), deadline)
    except BaseException:
        connection.close()
        raise


def _client_context(tls: TlsConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=None if tls.ca_file is None else str(tls.ca_file))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if tls.cert_file is not None:
        context.load_cert_chain(str(tls.cert_file), None if tls.key_file is None else str(tls.key_file))
    return context


def answer(reason: int = 0, crc: int = 0, message: str = "") -> tuple[Frame, bytes]:
    """Build an ANSWER and its payload."""
    text = message.encode()
    return Frame(FrameKind.ANSWER, begin=reason, crc=crc, length=len(text)), text
