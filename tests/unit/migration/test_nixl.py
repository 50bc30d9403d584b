"""KV by NIXL, with a stand-in for its agent: what is asked of it, in which order. NIXL itself is not run here."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from services.generation.kv_transfer.block_store import KvStore
from services.generation.kv_transfer.port import KvPort
from services.generation.kv_transfer.reason import NotMoved, Reason
from services.generation.kv_transfer.transfers import KvPart
from services.generation.migration import migration
from services.platform.config import ConfigError
from tests.unit.migration.scripted_kv import ScriptedInstance
from tests.unit.migration.test_port import BLOCKS, SIZE, TOKEN, WAIT, caches, until

Place = tuple[int, int]


class StandIn:
    """Copies within this process what it was told may be written to, and nothing else."""

    known: ClassVar[dict[str, StandIn]] = {}

    def __init__(self, name: str) -> None:
        self.name = name
        self.registered: set[Place] = set()
        self.peers: set[str] = set()
        self.handles: set[int] = set()
        self.writes = 0
        self.state = "DONE"
        StandIn.known[name] = self

    def get_agent_metadata(self) -> bytes:
        return repr((self.name, sorted(self.registered))).encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        name, _ = eval(metadata)
        self.peers.add(name)
        return str(name)

    def remove_remote_agent(self, agent: str) -> None:
        self.peers.remove(agent)

    def get_reg_descs(self, descs: Any, mem_type: str) -> Any:
        assert mem_type == "DRAM"
        return [(address, length) for address, length, _, _ in descs]

    def register_memory(self, reg_list: list[Place]) -> list[Place]:
        self.registered |= set(reg_list)
        return reg_list

    def deregister_memory(self, dereg_list: list[Place]) -> None:
        self.registered -= set(dereg_list)

    def get_xfer_descs(self, descs: Any, mem_type: str) -> Any:
        assert mem_type == "DRAM"
        return [(address, length) for address, length, _ in descs]

    def initialize_xfer(
        self, operation: str, local: list[Place], remote: list[Place], agent: str, notif_msg: bytes
    ) -> Any:
        assert operation == "WRITE"
        assert agent in self.peers
        assert set(local) <= self.registered
        assert set(remote) <= StandIn.known[agent].registered
        handle = (local[0], remote[0])
        self.handles.add(hash(handle))
        return handle

    def transfer(self, handle: tuple[Place, Place]) -> str:
        self.writes += 1
        return "PROC"

    def check_xfer_state(self, handle: tuple[Place, Place]) -> str:
        if self.state == "DONE":
            (source, length), (target, _) = handle
            ctypes.memmove(target, source, length)
        return self.state

    def release_xfer_handle(self, handle: tuple[Place, Place]) -> None:
        self.handles.remove(hash(handle))


def port(kv: list[torch.Tensor], agent: StandIn) -> tuple[KvPort, str]:
    store = KvStore(kv, BLOCKS, SIZE)
    made = KvPort(store, 0, chunk_bytes=2 * store.geometry.block_bytes, senders=2, agent=agent)
    return made, f"127.0.0.1:{made.listen('127.0.0.1', 0, None)}"


@pytest.fixture
def agents() -> Iterator[tuple[StandIn, StandIn]]:
    """Of donor and receiver; in the end nothing is registered, connected or under way."""
    made = StandIn("donor"), StandIn("receiver")
    yield made
    for each in made:
        until(lambda agent=each: not (agent.registered or agent.peers or agent.handles))


def test_kv_is_written_where_the_receiver_wants_it(agents: tuple[StandIn, StandIn]) -> None:
    ours, theirs = caches(), caches()
    donor, _ = port(ours, agents[0])
    receiver, address = port(theirs, agents[1])
    told: list[bytes] = []
    receiver.on_drafters(lambda name, states: told.append(states))
    receiver.expect("m", TOKEN, (9, 2, 5, 7), 0, WAIT)
    donor.send("m", [address], TOKEN, WAIT, KvPart(0, 3 * SIZE, (1, 2, 3))).result(WAIT)
    sent = donor.send("m", [], TOKEN, WAIT, KvPart(3 * SIZE, 2, (4,), b"states")).result(WAIT)
    assert receiver.received("m") == (3 * SIZE + 2, sent.crc)
    assert agents[0].writes == 3
    assert told == [b"states"]
    assert all(torch.equal(a[[1, 2, 3, 4]], b[[9, 2, 5, 7]]) for a, b in zip(ours, theirs, strict=True))
    donor.close()
    receiver.close()


def test_a_transfer_that_fails_fails_the_move(agents: tuple[StandIn, StandIn]) -> None:
    donor, _ = port(caches(), agents[0])
    receiver, address = port(caches(), agents[1])
    receiver.expect("m", TOKEN, (9,), 0, WAIT)
    agents[0].state = "ERR"
    error = donor.send("m", [address], TOKEN, WAIT, KvPart(0, SIZE, (1,))).exception(WAIT)
    assert isinstance(error, NotMoved)
    assert error.reason is Reason.CONNECTION
    donor.close()
    receiver.close()


def test_a_receiver_that_refuses_says_why(agents: tuple[StandIn, StandIn]) -> None:
    donor, _ = port(caches(), agents[0])
    receiver, address = port(caches(), agents[1])
    receiver.expect("m", TOKEN, (9, 1), 0, WAIT)
    donor.send("m", [address], TOKEN, WAIT, KvPart(0, SIZE, (1,))).result(WAIT)
    receiver.drop("m", Reason.WITHDRAWN)
    error = donor.send("m", [], TOKEN, WAIT, KvPart(SIZE, SIZE, (2,))).exception(WAIT)
    assert isinstance(error, NotMoved)
    assert error.reason in (Reason.WITHDRAWN, Reason.CONNECTION)
    donor.close()
    receiver.close()


def test_an_instance_without_the_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "nixl_installed", lambda: False)
    with pytest.raises(ConfigError, match="nixl is not installed"):
        ScriptedInstance("i", migration_transport="nixl")
