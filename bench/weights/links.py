"""Throttle links between processes of one machine, and measure the rate of loopback itself.

A link stands in front of a server. At most `rate` bytes a second pass to the server, and as many from it, over all
connections together. It moves them from socket to socket in the kernel, so that it takes little processor time.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import grpc

from bench.worker import PipedWorker

HOST, LINK_HOST = "127.0.0.1", "127.0.0.2"
"""Address of a server, and of the link in front of it, which has the same port."""
_CHUNK = 64 << 10
_BUFFER = 256 << 10
# Burst after a time of lower use: some milliseconds' worth.
_BURST_SECONDS = 0.005
_PIECE = 1 << 20


class LinkBytes(NamedTuple):
    """Bytes that passed to a server, and from it."""

    inbound: int
    outbound: int


class ByteBucket:
    """Token bucket: computes how long to wait until `count` bytes may pass. Pure; used under a lock."""

    def __init__(self, rate: float, burst_seconds: float = _BURST_SECONDS) -> None:
        """Allow `rate` bytes a second."""
        self.passed = 0
        self._rate = rate
        self._burst = burst_seconds
        self._free_at = float("-inf")

    def take(self, count: int, now: float) -> float:
        """Take `count` bytes; return the seconds to wait before the next ones."""
        self.passed += count
        self._free_at = max(self._free_at, now - self._burst) + count / self._rate
        return max(0.0, self._free_at - now)


class ThrottledLinks(PipedWorker):
    """Links in a separate process. Use it as a context manager."""

    def __init__(self, ports: Sequence[int], rate: float) -> None:
        """Listen in front of the servers at these ports. `rate` is in bytes a second."""
        super().__init__(_build, tuple(ports), rate)

    def passed(self) -> list[LinkBytes]:
        """Return the bytes that each link has carried so far."""
        answer: list[LinkBytes] = self.ask(None)
        return answer


def free_ports(count: int) -> list[int]:
    """Return ports that are free at both addresses."""
    found: list[int] = []
    # Hold each port until all are found.
    with ExitStack() as held:
        while len(found) < count:
            port = held.enter_context(socket.create_server((HOST, 0))).getsockname()[1]
            with suppress(OSError):
                held.enter_context(socket.create_server((LINK_HOST, port)))
                found.append(port)
    return found


def _build(ports: Sequence[int], rate: float) -> Callable[[None], list[LinkBytes]]:
    links = [_Link(port, rate) for port in ports]
    return lambda _: [link.passed() for link in links]


class _Link:
    def __init__(self, port: int, rate: float) -> None:
        self._port = port
        self._lock = threading.Lock()
        self._inbound, self._outbound = ByteBucket(rate), ByteBucket(rate)
        self._listener = socket.create_server((LINK_HOST, port))
        threading.Thread(target=self._accept, daemon=True).start()

    def passed(self) -> LinkBytes:
        with self._lock:
            return LinkBytes(self._inbound.passed, self._outbound.passed)

    def _accept(self) -> None:
        while True:
            caller, _ = self._listener.accept()
            try:
                server = socket.create_connection((HOST, self._port))
            except OSError:
                caller.close()  # the server has not started yet, or has ended
                continue
            for each in caller, server:
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            for source, target, bucket in (caller, server, self._inbound), (server, caller, self._outbound):
                threading.Thread(target=self._move, args=(source, target, bucket), daemon=True).start()

    def _move(self, source: socket.socket, target: socket.socket, bucket: ByteBucket) -> None:
        reading, writing = os.pipe()
        try:
            while count := os.splice(source.fileno(), writing, _CHUNK):
                left = count
                while left:
                    left -= os.splice(reading, target.fileno(), left)
                with self._lock:
                    pause = bucket.take(count, time.monotonic())
                if pause:
                    time.sleep(pause)
        except OSError:
            pass  # one end is gone
        finally:
            os.close(reading)
            os.close(writing)
            # The other direction ends with it. Both sockets are closed when no reference is left.
            for each in source, target:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)


# The rate of loopback ----------------------------------------------------------------------------------


def loopback_rate(total: int) -> float:
    """Return the bytes a second of one gRPC stream over loopback, in messages of 1 MB, between two processes."""
    with (
        PipedWorker(_receiver) as receiver,
        grpc.insecure_channel(f"{HOST}:{receiver.ask(None)}", options=_OPTIONS) as channel,
    ):
        call: Any = channel.stream_unary("/bench.Loopback/Take")
        call(iter([bytes(_PIECE)] * 8))
        began = time.perf_counter()
        call(iter([bytes(_PIECE)] * (total // _PIECE)))
        return total // _PIECE * _PIECE / (time.perf_counter() - began)


_OPTIONS = (("grpc.max_receive_message_length", 4 << 20),)


def _receiver() -> Callable[[None], int]:
    def take(requests: Iterator[bytes], _: grpc.ServicerContext) -> bytes:
        for _request in requests:
            pass
        return b"done"

    server = grpc.server(futures.ThreadPoolExecutor(1), options=_OPTIONS)
    handlers: dict[str, Any] = {"Take": grpc.stream_unary_rpc_method_handler(take)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Loopback", handlers),))

    def start(_: None) -> int:
        port = server.add_insecure_port(f"{HOST}:0")
        server.start()
        return port

    return start
