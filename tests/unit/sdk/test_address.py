"""Addresses are parsed in the forms that people write, or refused with advice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.transport.channel import Address, parse_address, parse_addresses


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("gateway", "gateway:7400"),
        ("gateway:1", "gateway:1"),
        ("10.0.0.1", "10.0.0.1:7400"),
        ("gateway.ns.svc.cluster.local.:7400", "gateway.ns.svc.cluster.local.:7400"),
        ("grpc://gateway:7401/", "gateway:7401"),
        ("http://gateway:7401", "gateway:7401"),
        ("GRPC://gateway", "gateway:7400"),
        ("dns:///gateway:7401", "gateway:7401"),
        ("gateway:7401/", "gateway:7401"),
        ("::1", "[::1]:7400"),
        ("[::1]", "[::1]:7400"),
        ("[::1]:7401", "[::1]:7401"),
        ("http://[2001:db8::2]:7401/", "[2001:db8::2]:7401"),
        ("2001:db8::abcd", "[2001:db8::abcd]:7400"),
        ("1:2:3:4:5:6:7:8000", "[1:2:3:4:5:6:7:8000]:7400"),
        ("unix:/run/g.sock", "unix:/run/g.sock"),
        ("unix:///run/g.sock", "unix:/run/g.sock"),
    ],
)
def test_addresses_are_read_as_they_are_meant(text: str, target: str) -> None:
    assert parse_address(text).target == target
    assert parse_address(target).target == target


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has the host ''"),
        (":7400", "has the host ''"),
        ("gateway:", "has the port ''"),
        ("gateway:0", "has the port '0'"),
        ("gateway:99999", "must be a number from 1 to 65535"),
        ("gateway:http", "has the port 'http'"),
        ("gateway:\uff17", "has the port"),
        ("me@gateway:7400", "has the host 'me@gateway'"),
        ("two words:7400", "has the host 'two words'"),
        ("https://gateway", "asks for TLS"),
        ("grpcs://gateway", "asks for TLS"),
        ("ftp://gateway", "has the scheme ftp"),
        ("http://gateway:8000/v1", "has the path /v1"),
        ("::1:7400", r"write \[::1\]:7400, or \[::1:7400\]:7400"),
        ("[::1", "is no IPv6 address"),
        ("[gateway]:7400", "is no IPv6 address"),
        ("[::1]7400", "is no IPv6 address"),
        ("a:b:c", "has several colons"),
        ("unix:", "names no file"),
        ("ipv4:127.0.0.1:7400", "has several colons"),
    ],
)
def test_an_invalid_address_is_refused_with_advice(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_address(text)


@given(st.text(max_size=12) | st.text("[]:/.a1", max_size=12), st.booleans())
def test_any_text_is_an_address_or_refused(text: str, tls: bool) -> None:
    try:
        found = parse_addresses(text, tls=tls)
    except ValueError as error:
        assert "address" in str(error)  # noqa: PT017
    else:
        assert all(1 <= each.port <= 65535 for each in found)
        assert parse_addresses(",".join(each.target for each in found), tls=False) == found


def test_several_and_those_of_tls() -> None:
    assert parse_addresses(" a , b:1,", tls=False) == [Address("a"), Address("b", 1)]
    assert parse_addresses("https://a", tls=True) == [Address("a")]
    with pytest.raises(ValueError, match="must be a string"):
        parse_addresses(7400, tls=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "loopback"),
    [
        ("localhost", True),
        ("LocalHost:1", True),
        ("127.0.0.1", True),
        ("127.8.8.8:1", True),
        ("[::1]:1", True),
        ("unix:/g", True),
        ("gateway", False),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
        ("[::]:1", False),
        ("127.0.0.1.example", False),
    ],
)
def test_loopback_addresses_are_recognized(text: str, loopback: bool) -> None:
    assert parse_address(text).loopback is loopback
