"""Let running samples keep their KV while weights change, out of reach of every other sample.

After the change a kept block holds KV of several versions, so no prefix may be found in it, neither now nor when
the sample fills more blocks. vLLM counts the blocks of a sample that are in its prefix cache, and adds those behind
them; a count that no sample reaches keeps all of them out. It goes when the sample gives its blocks back: what it
computes after a preemption is of one version again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from typing import Any


def keepable(scheduler: Any) -> list[str]:
    """Return the running samples that decode: they have KV of all their tokens but the last."""
    return [
        sample.request_id
        for sample in scheduler.running
        if sample.num_computed_tokens == sample.num_tokens - 1
    ]


def keep_apart(manager: Any, sample_id: str) -> None:
    """Keep all blocks of a sample out of the prefix cache until it gives them back.

    Args:
        manager: vLLM's KV cache manager, in which the sample has blocks.
        sample_id: the sample.
    """
    for each in manager.coordinator.single_type_managers:
        each.num_cached_block[sample_id] = sys.maxsize


def drop_other_kv(scheduler: Any, kept: Collection[str]) -> None:
    """Preempt all running samples but the kept ones, and empty the prefix cache. No step may be in flight.

    Args:
        scheduler: vLLM's scheduler.
        kept: ids of running samples.
    """
    now = time.monotonic()
    # In reverse, so that they wait in the order in which they ran.
    for sample in reversed([each for each in scheduler.running if each.request_id not in kept]):
        scheduler.running.remove(sample)
        scheduler._preempt_request(sample, now, drop_stale_output=True)
        # It may run in the next step, whose workers must be sent all of it.
        scheduler.prev_step_scheduled_req_ids.discard(sample.request_id)
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    # Blocks that a sample holds stay allocated.
    pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})
    for sample_id in kept:
        keep_apart(manager, sample_id)


def held_blocks(manager: Any, kept: Collection[str]) -> dict[int, object]:
    """Return the blocks that samples hold, by id, and the key of each in the prefix cache, None without one.

    Blocks of equal content share a key, because samples of one prompt may have computed it at the same time.
    """
    return {
        block.block_id: block.block_hash
        for sample_id in kept
        for group in manager.get_blocks(sample_id).blocks
        for block in group
        if not block.is_null
    }
