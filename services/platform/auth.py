"""Bearer tokens. Pure."""

from __future__ import annotations


def bearer_token(authorization: str) -> str:
    """The token in an `authorization` value "Bearer <token>"; empty when there is none."""
    scheme, _, given = authorization.partition(" ")
    return given if scheme.lower() == "bearer" else ""
