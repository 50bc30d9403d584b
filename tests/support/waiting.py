"""Wait for a condition that sets no event."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

LIMIT = 60.0
"""Seconds: far above what anything takes, so that only a failure reaches it."""


async def until(condition: Callable[[], Any], what: str, seconds: float = LIMIT) -> None:
    """Wait until the condition, which may be a coroutine function, holds; fail if it does not within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            while not await _holds(condition):  # noqa: ASYNC110 (what is waited for sets no event)
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"waited {seconds} s in vain until {what}")


async def _holds(condition: Callable[[], Any]) -> bool:
    result = condition()
    return bool(await result if isinstance(result, Awaitable) else result)
