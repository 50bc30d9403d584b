"""Installation commands for error messages about missing parts of Paceline."""

from __future__ import annotations

CHECKOUT = "a checkout of the repository"


def how_to_install(*extras: str, server: bool = False) -> str:
    """Return the command for an installation with `extras`, and with the server if `server`.

    Paceline is on no package index: it is installed from a checkout.
    """
    folder = f"'.[{','.join(extras)}]'" if extras else "."
    return f"pip install {folder}{' ./deploy/server' if server else ''} in {CHECKOUT}"
