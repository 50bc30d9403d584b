"""Blocks that samples keep over an update, in vLLM's own KV cache manager."""

from __future__ import annotations

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from services.generation.engine.kept_kv import held_blocks

BLOCK = 16


def test_blocks_of_equal_content_are_several_blocks_with_one_key() -> None:
    """A prompt that ends with a block: each sample computes its last block itself, and the cache has it once."""
    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=100, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    manager = KVCacheManager(config, max_model_len=512, scheduler_block_size=BLOCK, hash_block_size=BLOCK)
    hasher = get_request_block_hasher(BLOCK, sha256)
    prompt = list(range(2 * BLOCK))
    for sample_id in "abcd":
        request = Request(sample_id, list(prompt), SamplingParams(max_tokens=9), None, block_hasher=hasher)
        blocks, hit, *_ = manager.get_computed_blocks(request)
        manager.allocate_slots(request, len(prompt) - hit, hit, blocks)
        request.num_computed_tokens = len(prompt)
    held = held_blocks(manager, "abcd")
    # The first block is shared.
    assert len(held) == 1 + 4
    assert None not in held.values()
    assert len(set(held.values())) == len(manager.block_pool.cached_block_hash_to_block) == 2
