"""The reference of short-query attention against dense attention, and what is refused."""

from dataclasses import replace

import pytest
import torch

from kernels.short_query_attention import AttentionStep, attend


def make_step(**change):
    """Two requests, 5 and 3 positions, of which 2 and 1 are query tokens; blocks of 4."""
    generator = torch.Generator().manual_seed(3)
    keys, values = torch.randn(2, 6, 4, 2, 16, generator=generator)
    step = AttentionStep(
        query=torch.randn(3, 4, 16, generator=generator),
        keys=keys,
        values=values,
        block_table=torch.tensor([[4, 1], [2, 99]]),
        lengths=torch.tensor([5, 3]),
        cu_queries=torch.tensor([0, 2, 3]),
        longest_query=2,
        longest=5,
        scale=0.25,
    )
    return replace(step, **change)


def dense(step, request, query, positions):
    """Attention of one query token over positions of its request, head by head, in float64."""
    rows = [(int(step.block_table[request, p // 4]), p % 4) for p in positions]
    out = []
    for head in range(4):
        keys = torch.stack([step.keys[b, s, head // 2] for b, s in rows]).double()
        values = torch.stack([step.values[b, s, head // 2] for b, s in rows]).double()
        scores = keys @ step.query[query, head].double() * step.scale
        out.append(scores.softmax(0) @ values)
    return torch.stack(out)


def test_each_query_token_sees_what_lies_before_it():
    step = make_step()
    expected = torch.stack(
        [dense(step, 0, 0, range(4)), dense(step, 0, 1, range(5)), dense(step, 1, 2, range(3))]
    )
    torch.testing.assert_close(attend(step).double(), expected, rtol=1e-5, atol=1e-6)


def test_a_window_counts_the_token_itself():
    step = make_step(window=2)
    expected = torch.stack([dense(step, 0, 0, (2, 3)), dense(step, 0, 1, (3, 4)), dense(step, 1, 2, (1, 2))])
    torch.testing.assert_close(attend(step).double(), expected, rtol=1e-5, atol=1e-6)


def test_siblings_of_a_tree_do_not_see_each_other():
    step = make_step(tree=torch.tensor([0b01, 0b10, 0b1]))
    expected = torch.stack(
        [dense(step, 0, 0, range(4)), dense(step, 0, 1, (0, 1, 2, 4)), dense(step, 1, 2, range(3))]
    )
    torch.testing.assert_close(attend(step).double(), expected, rtol=1e-5, atol=1e-6)


def test_requests_without_query_tokens_have_no_rows():
    step = make_step()
    empty = replace(step, query=step.query[:0], cu_queries=torch.zeros(3, dtype=torch.int64), longest_query=0)
    assert attend(empty).shape == (0, 4, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.randn(3, 4, 20), "keys": torch.randn(6, 4, 2, 20)}, "values must have shape"),
        ({"query": torch.randn(3, 4, 16).double()}, "query must be float32, bfloat16, float16"),
        ({"query": torch.randn(3, 3, 16)}, "3 query heads must be a multiple of 2"),
        ({"lengths": torch.tensor([5])}, r"lengths must have shape \[2\]"),
        ({"lengths": torch.tensor([1, 3])}, "count a request's query tokens"),
        ({"lengths": torch.tensor([7, 3])}, "longest is 5, but a request has 7"),
        ({"cu_queries": torch.tensor([0, 2, 2])}, "rise from 0 to the 3 query tokens"),
        ({"longest_query": 1}, "longest_query is 1, but a request has 2"),
        ({"longest_query": 129}, r"0\.\.128"),
        ({"longest": 9}, r"longest must be in 0\.\.8"),
        ({"window": 0}, "window must be at least 1"),
        ({"window": 3, "tree": torch.zeros(3, dtype=torch.int64)}, "exclude each other"),
        ({"tree": torch.zeros(3, dtype=torch.int32)}, "tree must be int64"),
        ({"tree": torch.zeros(3, dtype=torch.int64), "longest_query": 65}, "at most 64 with a tree"),
        ({"block_table": torch.zeros(2, 2)}, "block_table must be int32, int64"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        attend(make_step(**change))


def test_head_sizes_are_multiples_of_8():
    step = make_step()
    cut = {name: getattr(step, name)[..., :12] for name in ("query", "keys", "values")}
    with pytest.raises(ValueError, match="multiple of 8 from 16 to 256, got 12"):
        attend(replace(step, **cut))
