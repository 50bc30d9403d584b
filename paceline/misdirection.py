"""Recognize, from what gRPC says, calls that went to a wrong address, and say what to do. Pure.

gRPC says it in words only, and with the code of a gateway that restarts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Misdirection:
    """Cause of calls that reach no gateway."""

    advice: str
    final: bool = True
    """False: a gateway that is starting, or restarts, looks the same from here."""


CLOSES = Misdirection("what listens there closes the connection: check the address", final=False)
NEEDS_TLS = Misdirection(
    "the gateway speaks TLS: give tls=paceline.Tls(ca_file=...), with a client certificate if it asks for one"
)
"""What a server that closes connections in plain text turns out to be, when it is asked."""
_CAUSES = (
    (
        ("http1.x server", "Expected SETTINGS frame"),
        Misdirection(
            "something that speaks HTTP/1 answers there, such as the facade or a metrics port: give the gateway's "
            "gRPC port, which is 7400 unless it was set"
        ),
    ),
    (
        ("Domain name not found", "address lookup failed", "DNS resolution failed"),
        Misdirection("the name of the host is not known on this machine: check the address"),
    ),
    (
        ("WRONG_VERSION_NUMBER",),
        Misdirection(
            "what answers there has no TLS: check the port, or leave tls out if the gateway has none"
        ),
    ),
    (
        ("CERTIFICATE_VERIFY_FAILED",),
        Misdirection("its certificate is not of a trusted authority: give tls=paceline.Tls(ca_file=...)"),
    ),
    (
        ("Hostname Verification Check failed",),
        Misdirection("its certificate is for another name: give tls=paceline.Tls(..., server_name=...)"),
    ),
    (
        ("Connection refused",),
        Misdirection(
            "nothing listens there: is the gateway running? `paceline up` starts one here", final=False
        ),
    ),
    (("Socket closed", "Connection reset", "Broken pipe"), CLOSES),
    (
        ("backend unhealthy",),
        Misdirection("it is no gateway that leads: another one does, or none yet", final=False),
    ),
)
"""Words of gRPC, and what they tell. Of several the first, since a message has the last error of each address."""


def misdirection_of(message: str) -> Misdirection | None:
    """Return why no gateway was reached; None: it is not known."""
    for words, cause in _CAUSES:
        if any(each in message for each in words):
            return cause
    return None
