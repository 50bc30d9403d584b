"""Connections to the port for KV: a limited number, and none keeps a move out. Over real sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from services.generation.kv_transfer.links import TcpLink
from services.generation.kv_transfer.port import Listener
from services.generation.kv_transfer.reason import NotMoved, Reason
from services.generation.kv_transfer.transfers import KvPart
from services.platform.config import TlsConfig
from tests.support.certificates import Authority
from tests.unit.migration.test_port import SIZE, TOKEN, WAIT, End, caches, make_end, same, send, until

LIMIT = 16


def place(end: End) -> tuple[str, int]:
    host, _, port = end.address.rpartition(":")
    return host, int(port)


class Threads:
    """The threads of connections that this test has brought about."""

    def __init__(self) -> None:
        self._before = set(threading.enumerate())

    def __len__(self) -> int:
        return sum(each.name == "kv-link" for each in set(threading.enumerate()) - self._before)


@contextmanager
def idle(end: End, count: int, threads: Threads) -> Iterator[list[socket.socket]]:
    """Hold connections that say nothing; of those that have not made way there are no more than the limit."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(place(end), WAIT)) for _ in range(count)]
        for each in held[:-LIMIT]:
            assert is_closed(each)
        # A thread has given its place to another a moment before it ends.
        until(lambda: len(threads) <= LIMIT)
        yield held


def is_closed(peer: socket.socket) -> bool:
    """Wait until the other side has closed a connection on which it says nothing."""
    try:
        return not peer.recv(1)
    except ConnectionResetError:
        return True


def credentials(folder: Path, secure: bool) -> tuple[TlsConfig | None, TlsConfig | None]:
    if not secure:
        return None, None
    authority = Authority(folder, "ours")
    return authority.tls("donor", client_auth=True), authority.tls("receiver", client_auth=True)


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_a_sample_moves_past_two_hundred_idle_connections(tmp_path: Path, secure: bool) -> None:
    ours, theirs = credentials(tmp_path, secure)
    donor, receiver = make_end(caches(), tls=ours), make_end(caches(), tls=theirs, connections=LIMIT)
    threads = Threads()
    with idle(receiver, 200, threads):
        receiver.port.expect("m", TOKEN, (1, 2), 0, WAIT)
        send(donor, receiver, KvPart(0, SIZE, (5,)))
        with idle(receiver, 2 * LIMIT, threads):
            # It is known by now, so it does not make way.
            send(donor, receiver, KvPart(SIZE, 1, (6,)))
    assert same(donor, [5, 6], receiver, [1, 2])
    donor.port.close()
    receiver.port.close()
    until(lambda: not len(threads))


def test_moves_do_not_make_way_for_one_more() -> None:
    threads = Threads()
    donor, receiver = make_end(caches()), make_end(caches(), connections=2)
    for name, block in (("a", 1), ("b", 3), ("c", 5)):
        receiver.port.expect(name, TOKEN, (block, block + 1), 0, WAIT)
    for name in ("a", "b"):
        send(donor, receiver, KvPart(0, SIZE, (5,)), name)
    with pytest.raises(NotMoved) as refused:
        send(donor, receiver, KvPart(0, SIZE, (5,)), "c")
    assert refused.value.reason is Reason.CONNECTION
    for name in ("a", "b"):
        donor.port.send(name, [], TOKEN, WAIT, KvPart(SIZE, 2, (6,))).result(WAIT)
    donor.port.end("a")
    donor.port.end("c")
    until(lambda: len(threads) == 1)
    assert "a" in receiver.port.failures()
    send(donor, receiver, KvPart(0, SIZE, (5,)), "c")
    donor.port.close()
    receiver.port.close()


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_a_peer_that_trickles_has_one_deadline_for_handshake_and_hello(tmp_path: Path, secure: bool) -> None:
    _, tls = credentials(tmp_path, secure)

    def serve(link: TcpLink) -> None:
        link.receive()

    listener = Listener("127.0.0.1", 0, tls, serve, patience=0.5)
    # The beginning of a TLS record, or of a frame: a long one that never ends.
    trickle = b"\x16\x03\x01\x01\x00\x01" + bytes(20) if secure else b"PKV1" + bytes(20)
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", listener.port), WAIT) as peer:
        peer.settimeout(0.1)
        sent, closed = 0, False
        while not closed:
            assert time.monotonic() - began < WAIT
            try:
                peer.send(trickle[sent : sent + 1])
                sent = min(sent + 1, len(trickle) - 1)
                closed = not peer.recv(1)
            except TimeoutError:
                continue
            except OSError:
                closed = True
    assert time.monotonic() - began >= 0.5
    listener.close()
