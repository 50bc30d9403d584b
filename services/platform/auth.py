"""Bearer tokens. Pure."""

from __future__ import annotations

import hmac


def authenticated(authorization: str, token: str) -> bool:
    """Whether an `authorization` value is "Bearer <token>"; takes the same time however much agrees."""
    scheme, _, given = authorization.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), token.encode())
