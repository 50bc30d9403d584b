"""KV by NIXL, where it is installed: RDMA or NVLink between the hosts' buffers instead of a TCP stream.

A link stays what it is, a TCP connection with the same frames; only the payload of a KV frame takes the other way.
The receiver says where it wants it, the donor writes it there, and says so:

    donor                        receiver
    KV header            ─▶
                         ◀─ READY        address, length, the agent's metadata
    (the payload is written by NIXL)
    DONE                 ─▶

Both ends must use it: the transport is part of the geometry that they compare.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from services.generation.migration.framing import BadFrame, Frame, Kind
from services.generation.migration.transport import STALL_SECONDS, Link

_PLACE = struct.Struct("!QQ")
_HOST = "DRAM"
_POLL_SECONDS = 0.0001


class Agent(Protocol):
    """What is used of `nixl._api.nixl_agent`."""

    name: str

    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> Any: ...
    def remove_remote_agent(self, agent: Any) -> Any: ...
    def get_reg_descs(self, descs: Any, mem_type: str) -> Any: ...
    def register_memory(self, reg_list: Any) -> Any: ...
    def deregister_memory(self, dereg_list: Any) -> Any: ...
    def get_xfer_descs(self, descs: Any, mem_type: str) -> Any: ...
    def initialize_xfer(
        self, operation: str, local: Any, remote: Any, agent: Any, notif_msg: bytes
    ) -> Any: ...
    def transfer(self, handle: Any) -> str: ...
    def check_xfer_state(self, handle: Any) -> str: ...
    def release_xfer_handle(self, handle: Any) -> Any: ...


def installed() -> bool:
    """Whether NIXL is there."""
    return importlib.util.find_spec("nixl") is not None


def make_agent(name: str) -> Agent:
    """An agent of this process, with NIXL's default backends. ImportError where it is not installed."""
    api = importlib.import_module("nixl._api")
    agent: Agent = api.nixl_agent(name, api.nixl_agent_config())
    return agent


class NixlLink:
    """A link whose KV goes by NIXL."""

    def __init__(self, control: Link, agent: Agent) -> None:
        """`control` carries the frames."""
        self._control = control
        self._agent = agent
        # Registered memory by address and length.
        self._registered: dict[tuple[int, int], Any] = {}
        self._peer: tuple[bytes, Any] | None = None
        self._kv = False
        # An answer that came where READY was waited for.
        self._early: Frame | None = None
        self._busy = threading.Lock()
        self._closed = False

    @property
    def deadline(self) -> float:
        """Of the monotonic clock."""
        return self._control.deadline

    @deadline.setter
    def deadline(self, value: float) -> None:
        self._control.deadline = value

    def send(self, frame: Frame, payload: bytes | memoryview = b"") -> None:
        """As `Link`."""
        if frame.kind is not Kind.KV:
            self._control.send(frame, payload)
            return
        with self._use():
            self._send_kv(frame, memoryview(payload))

    def _send_kv(self, frame: Frame, payload: memoryview) -> None:
        self._control.send(frame)
        ready = self._control.receive()
        if ready.kind is Kind.ANSWER:
            self._early = ready
            raise ConnectionError("the receiver did not want it")
        if ready.kind is not Kind.READY:
            raise BadFrame(f"{ready.kind.name} where READY was due")
        told = bytearray(ready.length)
        self._control.receive_into(memoryview(told))
        if zlib.crc32(told) != ready.crc or len(told) < _PLACE.size:
            raise BadFrame("a READY that arrived broken")
        address, length = _PLACE.unpack_from(told)
        if length != len(payload):
            raise BadFrame(f"READY for {length} bytes of {len(payload)}")
        self._write(payload, address, bytes(told[_PLACE.size :]))
        self._control.send(Frame(Kind.DONE))

    def receive(self) -> Frame:
        """As `Link`."""
        frame, self._early = self._early, None
        if frame is None:
            frame = self._control.receive()
        self._kv = frame.kind is Kind.KV
        return frame

    def receive_into(self, payload: memoryview) -> None:
        """As `Link`."""
        if not self._kv:
            self._control.receive_into(payload)
            return
        with self._use():
            self._receive_kv(payload)

    def _receive_kv(self, payload: memoryview) -> None:
        place = self._register(payload)
        # After the registration: the metadata tells of it.
        told = _PLACE.pack(*place) + self._agent.get_agent_metadata()
        self._control.send(Frame(Kind.READY, crc=zlib.crc32(told), length=len(told)), told)
        done = self._control.receive()
        if done.kind is not Kind.DONE:
            raise BadFrame(f"{done.kind.name} where DONE was due")

    def drain(self) -> None:
        """As `Link`."""
        self._control.drain()

    def close(self) -> None:
        """As `Link`. Memory that is being written to is let go by the thread that uses it."""
        self._control.close()
        self._closed = True
        self._let_go()

    def _let_go(self) -> None:
        """Undo what was registered, unless the link is in use: whoever uses it does it afterwards."""
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
                self._let_go()

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
                    raise TimeoutError("NIXL stalls")
                time.sleep(_POLL_SECONDS)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise ConnectionError(f"NIXL says {state}")
        finally:
            agent.release_xfer_handle(handle)

    def _register(self, payload: memoryview) -> tuple[int, int]:
        """Where a writable buffer is; registered once."""
        place = (ctypes.addressof(ctypes.c_char.from_buffer(payload)), len(payload))
        if place not in self._registered:
            descs = self._agent.get_reg_descs([(*place, 0, "")], _HOST)
            self._registered[place] = self._agent.register_memory(descs)
        return place
