"""Compute how many forks the engine steps of pre-generation have room for. Pure."""

from __future__ import annotations

from collections.abc import Callable

_MOST = 4096


def affordable(seconds: Callable[[int], float], running: int, forks: int, slowdown: float) -> int:
    """Return how many forks may join the samples of an instance; below 0, how many should leave.

    With all of its forks a step takes at most 1 + `slowdown` times as long as without them. Where no task is left
    that they could slow down there may be any number of them.

    Args:
        seconds: predicted time of a step by its number of samples; 0 where that is not known.
        running: tasks that are being generated.
        forks: forks that are.
        slowdown: as a share.
    """
    if not running:
        return _MOST
    most = (1 + slowdown) * seconds(running)
    if not most:
        return -forks
    fits, beyond = 0, _MOST
    while fits + 1 < beyond:
        tried = (fits + beyond) // 2
        fits, beyond = (tried, beyond) if seconds(running + tried) <= most else (fits, tried)
    return fits - forks
