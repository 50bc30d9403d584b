"""Garbage collection that leaves large heaps alone while they are in use.

A collection looks at every object that may be part of a cycle: 0.2 seconds for a thousand instances, up to 0.7 for
100,000 samples, in which the event loop does nothing. CPython does not keep its youngest generation small either
while many objects replace others. Nearly everything is freed without it, by its reference count. So what has lived
for a moment is frozen, which takes no time: automatic collections never look at it again. A full collection, which
finds the cycles among that, waits until nothing is in work.
"""

import asyncio
import gc
import time
from collections.abc import Callable

# Items of work in memory from which collections take long enough to be noticed.
_MANY = 4096
_LOOK_SECONDS = 0.1
# Time after a full collection until the next: while nothing is in work, and otherwise.
_FULL_SECONDS, _LONGEST_PAUSE = 600.0, 6 * 3600.0


def pause_collection(items: int) -> None:
    """Collect nothing for now if so many items of work are about to be in memory."""
    if items > _MANY:
        gc.disable()


async def collect_between(items: Callable[[], int]) -> None:
    """Let collections be short, and full ones rare, until cancelled. `items` tells how much work is in memory."""
    last = time.monotonic()
    try:
        while True:
            gc.freeze()
            held = items()
            if held > _MANY:
                gc.disable()
            else:
                gc.enable()
            passed = time.monotonic() - last
            if passed >= (_LONGEST_PAUSE if held else _FULL_SECONDS):
                gc.unfreeze()
                gc.collect()
                gc.freeze()
                last = time.monotonic()
            await asyncio.sleep(_LOOK_SECONDS)
    finally:
        gc.enable()
