"""Check on this processor, to the bit, that the results of a row do not depend on the other rows.

A sum in another order shows only where rounding makes it differ. So products are checked with data that cancel: the
true result is zero, and the computed one is nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from services.generation.engine.invariance.rows import MOST_ROWS, least_rows

QUERY_ROWS = {"amx": 32, "vec": 8, "vec16": 16}
"""Rows that vLLM's attention computes at once: query tokens times the heads that share a key-value head."""
# A step has any number of rows: these meet the ends of vectors and of the threads' parts.
_ROW_COUNTS = (*range(1, 66), 127, 512)
# Beyond the largest tile of a context, where the cache leaves 8,000 tokens.
_LONGEST_CONTEXT = 9_000
_BLOCK = 64
_DIFFERENT_ROWS = 256
RowsCall = Callable[[int], Sequence[torch.Tensor]]
"""Function of a number of equal rows that returns the results of a layer, [rows, *] each."""
_WAY_OUT = "leave batch_invariant out, or set it where vLLM has its own mode (CUDA)"


class NotInvariant(ValueError):
    """The logits of this model on this processor would depend on the batch."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"batch_invariant: {reason}; {_WAY_OUT}")


@dataclass(frozen=True, slots=True)
class ProductForm:
    """Form of a linear layer, on which vLLM's choice of a kernel depends."""

    outputs: int
    inputs: int
    dtype: torch.dtype
    bias: bool


@dataclass(frozen=True, slots=True)
class HeadForm:
    """Heads of an attention layer, their size, and vLLM's name of its kernel."""

    heads: int
    kv_heads: int
    size: int
    dtype: torch.dtype
    isa: str

    @property
    def most_queries(self) -> int:
        """Return the most query tokens for which vLLM's attention divides a context as for a single one."""
        rows, shared = QUERY_ROWS[self.isa], self.heads // self.kv_heads
        # vLLM computes each head with its own tokens if the heads that share KV do not fill the rows.
        return rows // shared if rows % shared == 0 else rows


def checked_least_rows(form: ProductForm) -> int:
    """Return the fewest rows from which on vLLM's product is the same to the bit, up to `MOST_ROWS` rows.

    Raises:
        NotInvariant: it depends on the number of rows, or on a row's place among them.
    """
    made, half = torch.Generator().manual_seed(form.inputs), form.inputs // 2
    weights = torch.randn(min(form.outputs, _DIFFERENT_ROWS), half, generator=made)
    order = torch.randperm(half, generator=made)
    rest = weights.new_zeros(len(weights), form.inputs % 2)
    weights = torch.cat((weights, weights[:, order], rest), 1).to(form.dtype)
    layer = nn.Module()
    layer.weight = _fixed(weights.repeat(-(-form.outputs // len(weights)), 1)[: form.outputs])
    layer.bias = _fixed(torch.zeros(form.outputs, dtype=form.dtype)) if form.bias else None
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    found = 1
    for _ in range(2):
        x = torch.randn(half, generator=made).to(form.dtype)
        row = torch.cat((x, -x[order], x.new_zeros(form.inputs % 2)))
        counts = range(1, MOST_ROWS + 1)
        least = least_rows(
            [layer.cpu_linear(row.repeat(count, 1), layer.weight, layer.bias) for count in counts]
        )
        if not least:
            what = f"{form.inputs} by {form.outputs} in {dtype_name(form.dtype)}"
            raise NotInvariant(f"on this processor a product of {what} depends on its number of rows")
        found = max(found, least)
    return found


def check_by_row(name: str, call: RowsCall) -> None:
    """Check a layer that computes each row by itself.

    Args:
        name: name of the layer.
        call: its results for a number of equal rows.

    Raises:
        NotInvariant: the results of a row depend on the number of rows.
    """
    wanted = call(1)
    for count in _ROW_COUNTS:
        found = call(count)
        if not all(torch.equal(one, other.expand_as(one)) for one, other in zip(found, wanted, strict=True)):
            raise NotInvariant(
                f"on this processor {name} depends on its number of rows: {count} differ from 1"
            )


def check_attention(form: HeadForm, longest: int) -> None:
    """Check attention of single query tokens against that of as many as are computed at once.

    Args:
        form: heads of the layers.
        longest: most tokens of a sample.

    Raises:
        NotInvariant: a token's attention depends on the other query tokens.
    """
    if form.isa == "amx":
        torch.cpu._init_amx()
    made, length = torch.Generator().manual_seed(0), min(longest, _LONGEST_CONTEXT)

    def random(heads: int) -> torch.Tensor:
        return torch.randn(length, heads, form.size, generator=made).to(form.dtype)

    blocks = -(-length // _BLOCK)
    cache = torch.zeros(blocks, form.kv_heads, 2 * _BLOCK, form.size, dtype=form.dtype)
    keys, values = cache.chunk(2, dim=2)
    slots = torch.arange(length)
    ops.cpu_attn_reshape_and_cache(
        random(form.kv_heads), random(form.kv_heads), keys, values, slots, form.isa
    )
    query, most = random(form.heads) * 2, form.most_queries
    for end in {length, max(1, length // 3), min(length, _BLOCK + 1)}:
        begin = max(0, end - 2 * most - 1)
        alone = [(place, place + 1) for place in range(begin, end)]
        together = [(place, min(place + most, end)) for place in range(begin, end, most)]
        one, other = (_attention(form, query, keys, values, groups) for groups in (alone, together))
        if not torch.equal(one, other):
            what = f"{form.heads} heads of {form.size} in {dtype_name(form.dtype)} ({form.isa})"
            raise NotInvariant(f"on this processor attention of {what} depends on the number of query tokens")


def schedule_of(form: HeadForm, starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return vLLM's schedule of a step's attention, in which no context is divided among threads.

    Args:
        form: heads of the layers.
        starts: divides the query tokens by group, [g + 1], int32.
        lengths: length of each group's context with its query tokens, [g], int32.
    """
    found: torch.Tensor = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(lengths),
        num_heads=form.heads,
        num_kv_heads=form.kv_heads,
        head_dim=form.size,
        seq_lens=lengths,
        dtype=form.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=form.isa,
        enable_kv_split=False,
    )
    return found


def _attention(
    form: HeadForm,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    groups: Sequence[tuple[int, int]],
) -> torch.Tensor:
    """Return the attention of groups of neighbouring positions, each as a separate sample."""
    rows = query[groups[0][0] : groups[-1][1]].contiguous()
    output = torch.empty_like(rows)
    ends = torch.tensor([end for _, end in groups], dtype=torch.int32)
    starts = torch.tensor([groups[0][0], *ends.tolist()], dtype=torch.int32) - groups[0][0]
    ops.cpu_attention_with_kv_cache(
        query=rows,
        key_cache=keys,
        value_cache=values,
        output=output,
        query_start_loc=starts,
        seq_lens=ends,
        scale=form.size**-0.5,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=torch.arange(len(keys), dtype=torch.int32).repeat(len(groups), 1),
        softcap=0.0,
        scheduler_metadata=schedule_of(form, starts, ends),
        s_aux=None,
    )
    return output


def _fixed(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as settings have it."""
    return str(dtype).removeprefix("torch.")
