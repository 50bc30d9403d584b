"""Vectors that travel in one block of memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.coupled_sampler.sample import Sampled, sample
from kernels.transfer import layout_of, uploaded, views

DTYPES = st.sampled_from([torch.int64, torch.float32, torch.int32])


@given(st.lists(st.tuples(st.integers(0, 40), DTYPES), max_size=6))
def test_vectors_lie_apart_and_begin_where_16_byte_loads_can(shapes):
    layout, size = layout_of(**{f"v{i}": shape for i, shape in enumerate(shapes)})
    memory = torch.zeros(size, dtype=torch.uint8)
    for number, part in enumerate(views(memory, layout).values()):
        part.fill_(number + 1)
    for number, ((count, dtype), part) in enumerate(zip(shapes, views(memory, layout).values(), strict=True)):
        assert part.dtype == dtype
        assert part.tolist() == [number + 1] * count
        assert (part.data_ptr() - memory.data_ptr()) % 16 == 0


def test_only_what_is_elsewhere_travels_and_in_one_block():
    here = torch.arange(3)
    there = uploaded({"a": here, "b": torch.ones(2), "c": here.to("meta")}, torch.device("meta"))
    assert there["a"].device.type == there["b"].device.type == "meta"
    assert there["a"].untyped_storage()._cdata == there["b"].untyped_storage()._cdata
    assert uploaded({"a": here}, torch.device("cpu"))["a"] is here


def test_a_result_without_a_block_of_memory_is_copied_from_where_it_is():
    """As the reference's is, on a device: torch raises, because memory of `meta` has no content."""
    part = torch.empty(1, device="meta")
    with pytest.raises(NotImplementedError, match="no data"):
        Sampled(part, part, part, part, part).to_host()


def test_a_result_in_host_memory_stays_where_it_is():
    ids, ones = torch.arange(2), torch.ones(2)
    found = sample(torch.randn(2, 9), ids, ids, ones, ids[:0], torch.arange(3))
    assert found.to_host() is found
