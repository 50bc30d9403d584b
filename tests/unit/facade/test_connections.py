"""Places of connections: who gets one, who makes way, and who is ended when."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from services.facade.server.connections import (
    LEAST_BYTES_PER_SECOND,
    TICK_SECONDS,
    ConnectionLimits,
    Connections,
    HttpConnection,
    State,
    address_of,
)

LIMITS = ConnectionLimits(
    total=8, each_address=6, header_seconds=2.0, idle_seconds=4.0, body_seconds=3.0, reader_seconds=5.0
)
DEADLINES = {
    State.ENDING: 2.0,
    State.WAITING: 2.0,
    State.RESTING: 4.0,
    State.RECEIVING: 3.0,
    State.SENDING: 5.0,
}
PER_SECOND = round(1 / TICK_SECONDS)


class Port:
    """Connections, and what becomes of them."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.all = Connections(LIMITS, lambda reason: self.reasons.update([reason]))
        self.ended: list[tuple[HttpConnection, State]] = []

    def open(self, host: str = "10.0.0.1", state: State = State.WAITING) -> HttpConnection | None:
        found = self.all.admit(host, lambda _: None)
        if found is not None:
            found.end = lambda state: self._end(found, state)
            self.all.enter(found, state)
        return found

    def _end(self, connection: HttpConnection, state: State) -> None:
        self.ended.append((connection, state))
        self.all.release(connection)

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds * PER_SECOND)):
            self.all.tick()


@pytest.fixture
def port() -> Port:
    return Port()


@pytest.mark.parametrize("state", DEADLINES)
def test_every_state_but_work_has_a_deadline(port: Port, state: State) -> None:
    late, working = port.open(state=state), port.open(state=State.WORKING)
    port.wait(DEADLINES[state])
    assert not port.ended
    port.wait(TICK_SECONDS)
    assert port.ended == [(late, state)]
    assert port.reasons == {state.value: 1}
    port.wait(60.0)
    assert len(port.ended) == 1
    assert working is not None
    assert len(port.all) == 1


def test_bytes_earn_time_for_a_body_and_for_nothing_else(port: Port) -> None:
    body, header = port.open(state=State.RECEIVING), port.open()
    assert body is not None
    assert header is not None
    for _ in range(10 * PER_SECOND):
        for each in (body, header):
            port.all.count(each, round(LEAST_BYTES_PER_SECOND * TICK_SECONDS) + 1)
        port.all.tick()
    assert port.ended == [(header, State.WAITING)]
    # What came fast at first is not enough for ever.
    port.wait(14.0)
    assert port.ended[1:] == [(body, State.RECEIVING)]


def test_entering_a_state_again_earns_no_time(port: Port) -> None:
    slow = port.open()
    assert slow is not None
    for _ in range(3 * PER_SECOND):
        port.all.enter(slow, State.WAITING)
        port.all.tick()
    assert port.ended == [(slow, State.WAITING)]


@pytest.mark.parametrize(
    ("age", "order"),
    [
        (0.0, [State.RESTING, State.ENDING, State.WAITING]),
        (0.75, [State.RESTING, State.ENDING, State.WAITING]),
        (1.0, [State.WAITING, State.RESTING, State.ENDING]),
    ],
    ids=["of new ones", "of ones that are still new", "of old ones"],
)
def test_who_has_nothing_in_work_makes_way_in_this_order(port: Port, age: float, order: list[State]) -> None:
    for state in (State.WORKING, State.SENDING, State.RECEIVING, State.ENDING, State.RESTING, State.WAITING):
        port.open(f"10.0.1.{len(port.all)}", state)
    port.open("10.0.2.1", State.WORKING)
    port.open("10.0.2.2", State.WORKING)
    port.wait(age)
    gone = []
    for number in range(3):
        assert port.open(f"10.0.3.{number}", State.WORKING) is not None
        gone.append(port.ended[-1][0].state)
    assert gone == order
    # Who is slow with a body or an answer has had no time yet, so the new one is refused.
    assert port.open("10.0.3.9") is None
    assert port.reasons == {"crowded": 3, "refused": 1}
    port.wait(LIMITS.header_seconds)
    assert port.open("10.0.3.9", State.WORKING) is not None
    assert port.open("10.0.3.10", State.WORKING) is not None
    assert [each.state for each, _ in port.ended[3:]] == [State.RECEIVING, State.SENDING]
    assert port.open("10.0.3.11") is None


def test_an_address_with_too_many_makes_way_for_itself(port: Port) -> None:
    mine = [port.open("10.0.0.1") for _ in range(LIMITS.each_address)]
    other = port.open("10.0.0.2")
    assert port.open("10.0.0.1", State.WORKING) is not None
    assert [each for each, _ in port.ended] == mine[:1]
    assert other is not None
    assert other.held
    for each in mine[1:]:
        assert each is not None
        port.all.enter(each, State.WORKING)
    assert port.open("10.0.0.1") is None
    assert port.open("10.0.0.3") is not None


def test_a_connection_is_released_once(port: Port) -> None:
    found = port.open()
    assert found is not None
    port.all.release(found)
    port.all.release(found)
    port.all.enter(found, State.WORKING)
    assert len(port.all) == 0
    port.wait(60.0)
    assert not port.ended


@pytest.mark.parametrize("seed", range(20))
def test_limits_hold_and_work_is_never_ended(seed: int) -> None:
    draw, port = random.Random(seed), Port()
    living: list[HttpConnection] = []
    for _ in range(400):
        match draw.randrange(4):
            case 0 | 1:
                found = port.open(f"10.0.0.{draw.randrange(4)}")
                living += [] if found is None else [found]
            case 2 if living:
                port.all.enter(draw.choice(living), draw.choice(list(State)))
            case _:
                if living and draw.random() < 0.5:
                    port.all.release(draw.choice(living))
                port.all.tick()
        living = [each for each in living if each.held]
        assert len(port.all) == len(living) <= LIMITS.total
        assert max(Counter(each.address for each in living).values(), default=0) <= LIMITS.each_address
    assert port.ended
    assert all(each.state is not State.WORKING for each, _ in port.ended)
    for each in living:
        port.all.release(each)
    port.wait(60.0)
    assert len(port.all) == 0


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_whom_a_connection_counts_for(host: str, address: str) -> None:
    assert address_of(host) == address
