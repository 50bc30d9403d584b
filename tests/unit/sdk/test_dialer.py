"""Replaced connections: each stays open until its calls have ended."""

from __future__ import annotations

import grpc

from paceline.transport.grpc import Dialer


def dialer(dialled: list[str], addresses: tuple[str, ...] = ("a:1", "b:1")) -> Dialer[grpc.Channel]:
    def dial(address: str) -> grpc.Channel:
        dialled.append(address)
        return grpc.insecure_channel(address)

    return Dialer(addresses, dial)


def test_addresses_are_dialled_in_turn() -> None:
    dialled: list[str] = []
    dials = dialer(dialled)
    for _ in range(3):
        dials.give_up(dials.current)
    assert dialled == ["a:1", "b:1", "a:1", "b:1"]


def test_many_calls_that_fail_together_dial_once() -> None:
    dialled: list[str] = []
    dials = dialer(dialled)
    taken = [dials.take() for _ in range(8)]
    for connection in taken:
        dials.give_up(connection)
    assert dialled == ["a:1", "b:1"]


def test_a_connection_that_was_given_up_is_closed_with_its_last_call() -> None:
    dials = dialer([])
    first, again = dials.take(), dials.take()
    dials.give_up(first)
    assert dials.give_back(first) is None
    assert dials.give_back(again) is first.channel
    second = dials.take()
    assert dials.give_back(second) is None, "it is the one in use"


def test_only_connections_in_use_stay_open() -> None:
    dials = dialer([])
    for _ in range(50):
        connection = dials.take()
        dials.give_up(connection)
        assert dials.give_back(connection) is connection.channel
    assert dials.close() == [dials.current.channel]


def test_nothing_is_dialled_after_the_end() -> None:
    dialled: list[str] = []
    dials = dialer(dialled)
    connection = dials.take()
    dials.close()
    dials.give_up(connection)
    assert dials.give_back(connection) is None
    assert dialled == ["a:1"]
