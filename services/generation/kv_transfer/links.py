"""Links between a donor and a receiver of KV: frames over one TCP connection for each migration and rank.

    donor                        receiver
    HELLO    id, rank, token ─▶
    KV       tokens, blocks  ─▶              any number of times
    DRAFTERS states          ─▶              at most once, when the sample is paused
    END                      ─▶
                             ◀─ ANSWER       CRC of the received KV; or, at any time, the reason why it ended

END asks whether everything so far has arrived; more KV and another END may follow. A frame is a header of fixed
length and a payload. `TcpLink` sends payloads over the connection, `NixlLink` sends KV with NIXL.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import socket
import ssl
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from services.platform.config import TlsConfig

_HEADER = struct.Struct("!4sBxxxIIIQ")
_HELLO = struct.Struct("!II")
_MAGIC = b"PKV1"
HEADER_BYTES = _HEADER.size
MOST_TEXT = 1 << 20
"""Longest payload of a frame that is not KV, in bytes."""
STALL_SECONDS = 5.0
"""A peer that neither accepts nor sends a byte for this long is given up before the deadline of the move."""
# NIXL: address and length in a READY, the kind of memory, and the interval at which a transfer is polled.
_PLACE = struct.Struct("!QQ")
_HOST = "DRAM"
_POLL_SECONDS = 0.0001


class FrameKind(IntEnum):
    """Kind of a frame."""

    HELLO = 1
    KV = 2
    DRAFTERS = 3
    END = 4
    ANSWER = 5
    # Used if KV does not go over the connection (`NixlLink`).
    READY = 6
    DONE = 7


class BadFrame(ValueError):
    """Bytes that are not a frame, or a frame that is not allowed here."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Header of a frame. In KV, `begin` and `count` are tokens of the sample; in ANSWER, `begin` is a reason or 0.

    `crc` is the CRC-32 of the payload of `length` bytes; in ANSWER, of all KV payloads so far.
    """

    kind: FrameKind
    begin: int = 0
    count: int = 0
    crc: int = 0
    length: int = 0

    def encode(self) -> bytes:
        """Return the header as `HEADER_BYTES` bytes."""
        return _HEADER.pack(_MAGIC, self.kind, self.begin, self.count, self.crc, self.length)

    @classmethod
    def decode(cls, data: bytes | bytearray) -> Frame:
        """Parse a header. BadFrame if it is invalid, or announces too long a text."""
        try:
            magic, kind, begin, count, crc, length = _HEADER.unpack(data)
            frame = cls(FrameKind(kind), begin, count, crc, length)
        except (struct.error, ValueError) as error:
            raise BadFrame(f"not a frame: {error}") from error
        if magic != _MAGIC:
            raise BadFrame("not a frame of this protocol")
        if frame.kind is not FrameKind.KV and length > MOST_TEXT:
            raise BadFrame(f"{length} bytes in a frame that may have {MOST_TEXT}")
        return frame


@dataclass(frozen=True, slots=True)
class Hello:
    """Identity of a donor's connection: migration, rank, and the token that the receiver issued for it."""

    migration_id: str
    rank: int
    token: bytes

    def encode(self) -> bytes:
        """Return the payload of a HELLO."""
        name = self.migration_id.encode()
        return _HELLO.pack(self.rank, len(name)) + name + self.token

    @classmethod
    def decode(cls, data: bytes) -> Hello:
        """Parse the payload of a HELLO. BadFrame if it is invalid."""
        try:
            rank, length = _HELLO.unpack_from(data)
            name = data[_HELLO.size : _HELLO.size + length]
            if len(name) != length:
                raise BadFrame("a HELLO that is too short")
            return cls(name.decode(), rank, data[_HELLO.size + length :])
        except (struct.error, UnicodeDecodeError) as error:
            raise BadFrame(f"not a HELLO: {error}") from error


def answer(reason: int = 0, crc: int = 0, message: str = "") -> tuple[Frame, bytes]:
    """Build an ANSWER and its payload."""
    text = message.encode()
    return Frame(FrameKind.ANSWER, begin=reason, crc=crc, length=len(text)), text


def running_crc(so_far: int, payload_crc: int) -> int:
    """Return the CRC of all payloads: the CRC of the next payload's CRC, continued from the CRC so far."""
    return zlib.crc32(payload_crc.to_bytes(4, "big"), so_far)


class KvLink(Protocol):
    """Connection between two ports, used by one thread at a time.

    Every call raises OSError when the connection has ended or stalls within a frame, and BadFrame for bytes that
    are not of this protocol.
    """

    deadline: float
    """Deadline of all sending and receiving, on the monotonic clock."""

    def identified(self, deadline: float) -> None:
        """Record that the peer has proved its identity, and may use the connection until this deadline."""

    def send(self, frame: Frame, payload: bytes | memoryview = b"") -> None:
        """Send a header and its payload. The caller may change the payload after this has returned."""

    def receive(self) -> Frame:
        """Return the next header."""

    def receive_into(self, payload: memoryview) -> None:
        """Receive the whole payload of the last header."""

    def drain(self) -> None:
        """Half-close, and read until the peer closes, which it does once it has read everything.

        Closing a connection with unread bytes would reset it, and discard the bytes that were sent. Waits at most
        STALL_SECONDS; it is no error if the peer does not close.
        """

    def close(self) -> None:
        """Close the connection, from any thread: a thread that waits for it gets an OSError."""


class TcpLink:
    """Link over a connected socket.

    Bulk data does not go through gRPC, which copies it several times: the operating system reads the packed buffer
    (`sendmsg` of a memoryview) and writes into the buffer that is unpacked (`recv_into`). TLS uses the certificates
    of the services; OpenSSL copies once on each side.
    """

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
        # Shutting down wakes a thread that is blocked in the socket; closing alone does not.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _set_timeout(self, patience: float = STALL_SECONDS) -> None:
        left = min(self.deadline - time.monotonic(), patience)
        if left <= 0:
            raise TimeoutError("the deadline is over")
        self._socket.settimeout(left)


def dial(address: str, tls: TlsConfig | None, deadline: float) -> TcpLink:
    """Connect to "host:port". OSError if that fails or the peer's certificate is not trusted."""
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


def nixl_installed() -> bool:
    """Return whether NIXL is installed."""
    return importlib.util.find_spec("nixl") is not None


def make_agent(name: str) -> Any:
    """Return an agent (`nixl_agent`) of this process, with NIXL's default backends.

    ImportError if NIXL is not installed.
    """
    api = importlib.import_module("nixl._api")
    return api.nixl_agent(name, api.nixl_agent_config())


class NixlLink:
    """Link that sends the payload of KV frames with NIXL, by RDMA or NVLink between host buffers.

    The link is still a connection with the same frames. The receiver answers a KV header with the address of its
    buffer, and the donor writes there:

        KV header            ─▶
                             ◀─ READY        address, length, the agent's metadata
        (NIXL writes the payload)
        DONE                 ─▶

    Both ends must use NIXL, because the transport is part of the geometry that they compare.
    """

    def __init__(self, control: KvLink, agent: Any) -> None:
        """Use `control` for frames, and `agent`, a `nixl_agent`, for KV."""
        self._control = control
        self._agent = agent
        # Registered memory by address and length.
        self._registered: dict[tuple[int, int], Any] = {}
        self._peer: tuple[bytes, Any] | None = None
        self._kv = False
        # An ANSWER that arrived instead of READY.
        self._early: Frame | None = None
        self._busy = threading.Lock()
        self._closed = False

    @property
    def deadline(self) -> float:
        """Deadline on the monotonic clock."""
        return self._control.deadline

    @deadline.setter
    def deadline(self, value: float) -> None:
        self._control.deadline = value

    def identified(self, deadline: float) -> None:
        """As `KvLink`."""
        self._control.identified(deadline)

    def send(self, frame: Frame, payload: bytes | memoryview = b"") -> None:
        """As `KvLink`."""
        if frame.kind is not FrameKind.KV:
            self._control.send(frame, payload)
            return
        with self._use():
            self._send_kv(frame, memoryview(payload))

    def _send_kv(self, frame: Frame, payload: memoryview) -> None:
        self._control.send(frame)
        ready = self._control.receive()
        if ready.kind is FrameKind.ANSWER:
            self._early = ready
            raise ConnectionError("the receiver refused the KV")
        if ready.kind is not FrameKind.READY:
            raise BadFrame(f"{ready.kind.name} instead of READY")
        data = bytearray(ready.length)
        self._control.receive_into(memoryview(data))
        if zlib.crc32(data) != ready.crc or len(data) < _PLACE.size:
            raise BadFrame("READY arrived corrupted")
        address, length = _PLACE.unpack_from(data)
        if length != len(payload):
            raise BadFrame(f"READY for {length} bytes of {len(payload)}")
        self._write(payload, address, bytes(data[_PLACE.size :]))
        self._control.send(Frame(FrameKind.DONE))

    def receive(self) -> Frame:
        """As `KvLink`."""
        frame, self._early = self._early, None
        if frame is None:
            frame = self._control.receive()
        self._kv = frame.kind is FrameKind.KV
        return frame

    def receive_into(self, payload: memoryview) -> None:
        """As `KvLink`."""
        if not self._kv:
            self._control.receive_into(payload)
            return
        with self._use():
            self._receive_kv(payload)

    def _receive_kv(self, payload: memoryview) -> None:
        place = self._register(payload)
        # Read after the registration, because the metadata includes it.
        data = _PLACE.pack(*place) + self._agent.get_agent_metadata()
        self._control.send(Frame(FrameKind.READY, crc=zlib.crc32(data), length=len(data)), data)
        done = self._control.receive()
        if done.kind is not FrameKind.DONE:
            raise BadFrame(f"{done.kind.name} instead of DONE")

    def drain(self) -> None:
        """As `KvLink`."""
        self._control.drain()

    def close(self) -> None:
        """As `KvLink`. A thread that is using registered memory releases it afterwards itself."""
        self._control.close()
        self._closed = True
        self._release()

    def _release(self) -> None:
        """Deregister memory and peer, unless the link is in use: its user does so afterwards."""
        if not self._busy.acquire(blocking=False):
            return
        try:
            if self._peer is not None:
                self._agent.remove_remote_agent(self._peer[1])
                self._peer = None
            for descs in self._registered.values():
                self._agent.deregister_memory(descs)
            self._registered.clear()
        finally:
            self._busy.release()

    @contextmanager
    def _use(self) -> Iterator[None]:
        try:
            with self._busy:
                if self._closed:
                    raise ConnectionError("the link is closed")
                yield
        finally:
            if self._closed:
                self._release()

    def _write(self, payload: memoryview, address: int, metadata: bytes) -> None:
        agent = self._agent
        if self._peer is None or self._peer[0] != metadata:
            self._peer = (metadata, agent.add_remote_agent(metadata))
        here = self._register(payload)
        local = agent.get_xfer_descs([(*here, 0)], _HOST)
        remote = agent.get_xfer_descs([(address, len(payload), 0)], _HOST)
        handle = agent.initialize_xfer("WRITE", local, remote, self._peer[1], b"")
        try:
            state, began = agent.transfer(handle), time.monotonic()
            while state == "PROC":
                now = time.monotonic()
                if now - began > STALL_SECONDS or now > self.deadline:
                    raise TimeoutError("the NIXL transfer stalled")
                time.sleep(_POLL_SECONDS)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise ConnectionError(f"the NIXL transfer ended as {state}")
        finally:
            agent.release_xfer_handle(handle)

    def _register(self, payload: memoryview) -> tuple[int, int]:
        """Return the address and the length of a writable buffer; registers it at its first use."""
        place = (ctypes.addressof(ctypes.c_char.from_buffer(payload)), len(payload))
        if place not in self._registered:
            descs = self._agent.get_reg_descs([(*place, 0, "")], _HOST)
            self._registered[place] = self._agent.register_memory(descs)
        return place
