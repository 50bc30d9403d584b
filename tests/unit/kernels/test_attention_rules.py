"""Which layers and steps are for our attention."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.generation.config import GenerationConfig
from services.generation.engine.attention_backend import (
    LONGEST_SHORT_QUERY,
    LayerTraits,
    is_short,
    layer_refusal,
)

PLAIN = LayerTraits(head_size=128, heads=16, kv_heads=8)


@given(
    size=st.integers(8, 32).map(lambda eighths: 8 * eighths),
    kv_heads=st.integers(1, 16),
    group=st.integers(1, 16),
    window=st.none() | st.integers(1, 10**6),
    kv_dtype=st.sampled_from(["auto", "bfloat16", "float16"]),
)
def test_heads_of_64_to_256_in_any_groups_with_or_without_a_window_are_ours(
    size, kv_heads, group, window, kv_dtype
):
    assert (
        layer_refusal(LayerTraits(size, kv_heads * group, kv_heads, kv_dtype=kv_dtype, window=window)) is None
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"decoder": False}, "decoder"),
        ({"head_size": 264}, "264"),
        ({"head_size": 100}, "multiple of 8"),
        ({"kv_dtype": "fp8"}, "fp8"),
        ({"kv_dtype": "int4_per_token_head"}, "int4"),
        ({"kv_heads": 5}, "groups"),
        ({"kv_heads": 0}, "groups"),
        ({"alibi": True}, "ALiBi"),
        ({"soft_cap": 30.0}, "capped"),
        ({"sinks": True}, "sinks"),
        ({"lookback": True}, "chunks"),
        ({"context_parallel": True}, "split among devices"),
        ({"microbatches": True}, "microbatches"),
        ({"batch_invariant": True}, "batch"),
    ],
)
def test_what_the_kernel_does_not_do_is_vllms_and_the_reason_says_so(change, reason):
    assert reason in layer_refusal(replace(PLAIN, **change))


@given(longest=st.integers(0, 200))
def test_a_step_is_short_by_its_longest_query(longest):
    assert is_short(longest, True, False) is (1 <= longest <= LONGEST_SHORT_QUERY)


def test_drafts_as_long_as_the_default_window_are_verified_by_our_kernel():
    assert is_short(1 + GenerationConfig.model_fields["draft_window"].default, True, False)


@pytest.mark.parametrize(
    ("causal", "special"), [(False, False), (torch.ones(2), False), (True, True)], ids=["no", "each", "masks"]
)
def test_steps_whose_queries_see_other_positions_are_vllms(causal, special):
    assert not is_short(1, causal, special)
