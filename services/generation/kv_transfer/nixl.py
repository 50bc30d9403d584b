"""Transfer KV by NIXL, where it is installed: RDMA or NVLink between host buffers instead of a TCP stream.

The link remains a TCP connection with the same frames; only the payload of a KV frame travels by NIXL. The receiver
answers with the address of its buffer, and the donor writes the payload there:

    donor                        receiver
    KV header            ─▶
                         ◀─ READY        address, length, the agent's metadata
    (NIXL writes the payload)
    DONE                 ─▶

Both ends must use it, because the transport is part of the geometry that they compare.
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
from typing import Any

from services.generation.kv_transfer.framing import BadFrame, Frame, FrameKind
from services.generation.kv_transfer.transport import STALL_SECONDS, KvLink

_PLACE = struct.Struct("!QQ")
_HOST = "DRAM"
_POLL_SECONDS = 0.0001


def installed() -> bool:
    """Return whether NIXL is installed."""
    return importlib.util.find_spec("nixl") is not None


def make_agent(name: str) -> Any:
    """Return an agent (`nixl_agent`) of this process, with NIXL's default backends.

    ImportError where it is not installed.
    """
    api = importlib.import_module("nixl._api")
    return api.nixl_agent(name, api.nixl_agent_config())


class NixlLink:
    """Link whose KV travels by NIXL."""

    def __init__(self, control: KvLink, agent: Any) -> None:
        """Use `control` for frames, and `agent`, a `nixl_agent`, for KV."""
        self._control = control
        self._agent = agent
        # Registered memory by address and length.
        self._registered: dict[tuple[int, int], Any] = {}
        self._peer: tuple[bytes, Any] | None = None
        self._kv = False
        # An ANSWER that came in the place of READY.
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
            raise BadFrame(f"{ready.kind.name} where READY was due")
        told = bytearray(ready.length)
        self._control.receive_into(memoryview(told))
        if zlib.crc32(told) != ready.crc or len(told) < _PLACE.size:
            raise BadFrame("a READY that arrived broken")
        address, length = _PLACE.unpack_from(told)
        if length != len(payload):
            raise BadFrame(f"READY for {length} bytes of {len(payload)}")
        self._write(payload, address, bytes(told[_PLACE.size :]))
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
        # After the registration, because the metadata includes it.
        told = _PLACE.pack(*place) + self._agent.get_agent_metadata()
        self._control.send(Frame(FrameKind.READY, crc=zlib.crc32(told), length=len(told)), told)
        done = self._control.receive()
        if done.kind is not FrameKind.DONE:
            raise BadFrame(f"{done.kind.name} where DONE was due")

    def drain(self) -> None:
        """As `KvLink`."""
        self._control.drain()

    def close(self) -> None:
        """As `KvLink`. A thread that is using registered memory releases it itself, afterwards."""
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
        """Return address and length of a writable buffer, which is registered once."""
        place = (ctypes.addressof(ctypes.c_char.from_buffer(payload)), len(payload))
        if place not in self._registered:
            descs = self._agent.get_reg_descs([(*place, 0, "")], _HOST)
            self._registered[place] = self._agent.register_memory(descs)
        return place
