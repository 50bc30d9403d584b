"""Two ports and the connections between them: KV arrives as it was sent, in its blocks, or not at all."""

from __future__ import annotations

import socket
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from services.generation.kv_transfer import links
from services.generation.kv_transfer.block_store import KvStore, UnsupportedCaches
from services.generation.kv_transfer.links import MOST_TEXT, Frame, FrameKind, Hello
from services.generation.kv_transfer.port import KvPort
from services.generation.kv_transfer.reason import NotMoved, Reason
from services.generation.kv_transfer.transfers import KvPart
from services.platform.config import TlsConfig
from tests.support.certificates import Authority

BLOCKS, SIZE, LAYERS, HEADS, CONTENT = 12, 4, 3, 2, 6
WAIT = 60.0
TOKEN = b"t" * 32


def caches(order: tuple[int, ...] = (0, 1, 2, 3), dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Random caches [B, H, N, C] that lie in memory in an order of these axes."""
    shape = (BLOCKS, HEADS, SIZE, CONTENT)
    back = [order.index(axis) for axis in range(4)]
    return [torch.randn([shape[axis] for axis in order]).to(dtype).permute(back) for _ in range(LAYERS)]


@dataclass
class End:
    kv: list[torch.Tensor]
    port: KvPort
    address: str = ""


def make_end(
    kv: list[torch.Tensor],
    rank: int = 0,
    chunk_blocks: int = 2,
    tls: TlsConfig | None = None,
    connections: int = 64,
) -> End:
    store = KvStore(kv, BLOCKS, SIZE)
    port = KvPort(store, rank, chunk_bytes=chunk_blocks * store.geometry.block_bytes, senders=2)
    return End(kv, port, f"127.0.0.1:{port.listen('127.0.0.1', 0, tls, connections)}")


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    donor, receiver = make_end(caches()), make_end(caches())
    yield donor, receiver
    donor.port.close()
    receiver.port.close()


def send(donor: End, receiver: End, part: KvPart, name: str = "m", token: bytes = TOKEN) -> object:
    return donor.port.send(name, [receiver.address], token, WAIT, part).result(WAIT)


def failure(donor: End, receiver: End, part: KvPart, name: str = "m", token: bytes = TOKEN) -> Reason:
    with pytest.raises(NotMoved) as caught:
        send(donor, receiver, part, name, token)
    return caught.value.reason


def same(donor: End, here: list[int], receiver: End, there: list[int]) -> bool:
    return all(torch.equal(a[here], b[there]) for a, b in zip(donor.kv, receiver.kv, strict=True))


def until(holds: object) -> None:
    deadline = time.monotonic() + WAIT
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.001)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_blocks", [1, 3, 50])
def test_two_stages_arrive_in_the_reserved_blocks(
    order: tuple[int, ...], dtype: torch.dtype, chunk_blocks: int
) -> None:
    donor, receiver = (
        make_end(caches(order, dtype), chunk_blocks=chunk_blocks),
        make_end(caches(order, dtype)),
    )
    others = [each.clone() for each in receiver.kv]
    told: list[tuple[str, bytes]] = []
    receiver.port.on_drafters(lambda name, states: told.append((name, states)))
    # Of 5 blocks the receiver has the first.
    receiver.port.expect("m", TOKEN, (9, 2, 5, 7, 1), SIZE, WAIT)
    first = donor.port.send("m", [receiver.address], TOKEN, WAIT, KvPart(SIZE, 2 * SIZE, (3, 8)))
    assert first.result(WAIT).nbytes == 2 * donor.port._sender._store.geometry.block_bytes
    second = donor.port.send("m", [], TOKEN, WAIT, KvPart(3 * SIZE, SIZE + 1, (4, 11), b"what drafters know"))
    sent = second.result(WAIT)
    assert told == [("m", b"what drafters know")]
    assert receiver.port.received("m") == (4 * SIZE + 1, sent.crc)
    assert same(donor, [3, 8, 4, 11], receiver, [2, 5, 7, 1])
    untouched = [block for block in range(BLOCKS) if block not in (2, 5, 7, 1)]
    assert all(torch.equal(a[untouched], b[untouched]) for a, b in zip(others, receiver.kv, strict=True))
    donor.port.close()
    receiver.port.close()


def test_nobody_without_the_token_and_the_token_once(ends: tuple[End, End]) -> None:
    donor, receiver = ends
    receiver.port.expect("m", TOKEN, (1, 2), 0, WAIT)
    assert failure(donor, receiver, KvPart(0, SIZE, (1,)), token=b"x" * 32) is Reason.CONNECTION
    assert failure(donor, receiver, KvPart(0, SIZE, (1,)), name="other") is Reason.CONNECTION
    donor.port.end("m")
    send(donor, receiver, KvPart(0, SIZE, (1,)))
    again = make_end(caches())
    assert failure(again, receiver, KvPart(0, SIZE, (1,))) is Reason.CONNECTION
    # The one that has the token was not disturbed.
    send(donor, receiver, KvPart(SIZE, SIZE, (2,)))
    again.port.close()


@pytest.mark.parametrize(
    "part",
    [
        KvPart(SIZE, SIZE, (1,)),  # a gap
        KvPart(0, 3 * SIZE, (1, 2, 3)),  # beyond the reservation
    ],
)
def test_kv_that_does_not_belong_is_refused(ends: tuple[End, End], part: KvPart) -> None:
    donor, receiver = ends
    before = [each.clone() for each in receiver.kv]
    receiver.port.expect("m", TOKEN, (1, 2), 0, WAIT)
    assert failure(donor, receiver, part) is Reason.CONNECTION
    until(lambda: "m" in receiver.port.failures())
    # What came before was allowed, and went into reserved blocks only.
    untouched = [block for block in range(BLOCKS) if block not in (1, 2)]
    assert all(torch.equal(a[untouched], b[untouched]) for a, b in zip(before, receiver.kv, strict=True))


def test_broken_kv_never_reaches_a_block(ends: tuple[End, End]) -> None:
    _, receiver = ends
    before = [each.clone() for each in receiver.kv]
    receiver.port.expect("m", TOKEN, (1, 2), 0, WAIT)
    host, _, port = receiver.address.rpartition(":")
    link = links.TcpLink(socket.create_connection((host, int(port))), time.monotonic() + WAIT)
    hello = Hello("m", 0, TOKEN).encode()
    link.send(Frame(FrameKind.HELLO, crc=zlib.crc32(hello), length=len(hello)), hello)
    payload = bytes(receiver.port._receiver._store.geometry.block_bytes)
    link.send(Frame(FrameKind.KV, 0, SIZE, zlib.crc32(payload) ^ 1, len(payload)), payload)
    answer = link.receive()
    assert (answer.kind, Reason.of(answer.begin)) == (FrameKind.ANSWER, Reason.CHECKSUM)
    until(lambda: "m" in receiver.port.failures())
    with pytest.raises(NotMoved):
        receiver.port.received("m")
    assert all(torch.equal(a, b) for a, b in zip(before, receiver.kv, strict=True))
    link.close()


def test_a_dropped_reservation_tells_the_donor_why(ends: tuple[End, End]) -> None:
    donor, receiver = ends
    receiver.port.expect("m", TOKEN, (1, 2), 0, WAIT)
    send(donor, receiver, KvPart(0, SIZE, (1,)))
    receiver.port.drop("m", Reason.WITHDRAWN)
    assert failure(donor, receiver, KvPart(SIZE, SIZE, (2,))) in (Reason.WITHDRAWN, Reason.CONNECTION)
    with pytest.raises(NotMoved):
        receiver.port.received("m")


def test_a_donor_that_ends_is_noticed(ends: tuple[End, End]) -> None:
    donor, receiver = ends
    receiver.port.expect("m", TOKEN, (1, 2), 0, WAIT)
    send(donor, receiver, KvPart(0, SIZE, (1,)))
    donor.port.end("m")
    until(lambda: "m" in receiver.port.failures())
    assert receiver.port.failures()["m"].reason is Reason.CONNECTION


def test_giving_up_wakes_a_sender_whose_peer_says_nothing(ends: tuple[End, End]) -> None:
    donor, _ = ends
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        sending = donor.port.send("m", [address], TOKEN, 100 * WAIT, KvPart(0, SIZE, (1,)))
        peer, _ = silent.accept()
        with peer:
            assert peer.recv(1)
            donor.port.end("m")
            assert isinstance(sending.exception(WAIT), NotMoved)


def test_a_peer_that_says_nothing_costs_the_deadline_and_no_more(ends: tuple[End, End]) -> None:
    donor, _ = ends
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        error = donor.port.send("m", [address], TOKEN, 0.2, KvPart(0, SIZE, (1,))).exception(WAIT)
    assert isinstance(error, NotMoved)
    assert error.reason is Reason.DEADLINE


def test_a_receiver_that_is_not_there(ends: tuple[End, End]) -> None:
    donor, receiver = ends
    receiver.port.close()
    assert failure(donor, receiver, KvPart(0, SIZE, (1,))) is Reason.CONNECTION


def test_several_samples_at_once(ends: tuple[End, End]) -> None:
    donor, receiver = ends
    for name, block in (("a", 1), ("b", 2), ("c", 3)):
        receiver.port.expect(name, TOKEN, (block,), 0, WAIT)
    parts = {"a": 4, "b": 5, "c": 6}
    sending = [
        donor.port.send(name, [receiver.address], TOKEN, WAIT, KvPart(0, SIZE, (block,)))
        for name, block in parts.items()
    ]
    for each in sending:
        each.result(WAIT)
    assert same(donor, [4, 5, 6], receiver, [1, 2, 3])


def test_each_rank_talks_to_its_peer() -> None:
    donors, receivers = (
        [make_end(caches(), rank) for rank in (0, 1)],
        [make_end(caches(), rank) for rank in (0, 1)],
    )
    addresses = [each.address for each in receivers]
    for each in receivers:
        each.port.expect("m", TOKEN, (7,), 0, WAIT)
    for each in donors:
        each.port.send("m", addresses, TOKEN, WAIT, KvPart(0, 2, (5,))).result(WAIT)
    for donor, receiver in zip(donors, receivers, strict=True):
        assert same(donor, [5], receiver, [7])
    # Not to another's.
    receivers[1].port.expect("n", TOKEN, (8,), 0, WAIT)
    wrong = donors[0].port.send("n", addresses[::-1], TOKEN, WAIT, KvPart(0, 2, (5,))).exception(WAIT)
    assert isinstance(wrong, NotMoved)
    for each in (*donors, *receivers):
        each.port.close()


def test_with_tls_only_those_talk_who_trust_each_other(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    donor = make_end(caches(), tls=ours.tls("donor", client_auth=True))
    receiver = make_end(caches(), tls=ours.tls("receiver", client_auth=True))
    stranger = make_end(caches(), tls=theirs.tls("stranger", client_auth=True))
    plain = make_end(caches())
    receiver.port.expect("m", TOKEN, (1, 2), 0, WAIT)
    assert failure(stranger, receiver, KvPart(0, SIZE, (5,))) is Reason.CONNECTION
    assert failure(plain, receiver, KvPart(0, SIZE, (5,))) is Reason.CONNECTION
    send(donor, receiver, KvPart(0, SIZE, (5,)))
    send(donor, receiver, KvPart(SIZE, 1, (6,), b"states"))
    assert same(donor, [5, 6], receiver, [1, 2])
    donor.port.end("m")
    until(lambda: "m" in receiver.port.failures())
    for each in (donor, receiver, stranger, plain):
        each.port.close()


def test_drafters_that_know_more_than_a_frame_holds_wait_for_the_commit(ends: tuple[End, End]) -> None:
    donor, receiver = ends
    told: list[tuple[str, bytes]] = []
    receiver.port.on_drafters(lambda name, states: told.append((name, states)))
    receiver.port.expect("m", TOKEN, (1,), 0, WAIT)
    send(donor, receiver, KvPart(0, SIZE, (1,), bytes(MOST_TEXT + 1)))
    assert told == []
    assert same(donor, [1], receiver, [1])


def test_no_thread_is_left() -> None:
    # Those of other tests of this process may have to wait for a deadline.
    before = set(threading.enumerate())

    def ours() -> list[str]:
        threads = set(threading.enumerate()) - before
        return [each.name for each in threads if each.name in ("kv-link", "kv-listener")]

    donor, receiver = make_end(caches()), make_end(caches())
    receiver.port.expect("m", TOKEN, (1,), 0, WAIT)
    send(donor, receiver, KvPart(0, SIZE, (1,)))
    assert sorted(ours()) == ["kv-link", "kv-listener", "kv-listener"]
    donor.port.close()
    receiver.port.close()
    until(lambda: not ours())


@pytest.mark.parametrize(
    "kv",
    [
        [],
        [torch.zeros(BLOCKS, HEADS, SIZE)],
        [torch.zeros(BLOCKS * 2, HEADS, SIZE // 2, CONTENT)],
        [torch.zeros(HEADS, BLOCKS, SIZE, CONTENT).permute(1, 0, 2, 3)],
        [torch.zeros(BLOCKS, HEADS, SIZE, CONTENT), torch.zeros(BLOCKS, HEADS, SIZE, CONTENT + 1)],
        [torch.zeros(BLOCKS, HEADS, SIZE, 2 * CONTENT)[..., :CONTENT]],
    ],
    ids=["none", "axes", "split blocks", "blocks inside", "unlike", "gaps"],
)
def test_caches_that_cannot_be_moved(kv: list[torch.Tensor]) -> None:
    with pytest.raises(UnsupportedCaches):
        KvStore(kv, BLOCKS, SIZE)
