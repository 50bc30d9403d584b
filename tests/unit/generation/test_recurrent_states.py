"""Copies of recurrent states: of each layer that has one, and only of the samples at the given places."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.utils.cpu_triton_utils import _batch_memcpy_impl
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec, UniformTypeKVCacheSpecs

from services.generation.engine import recurrent_states as module
from services.generation.engine.recurrent_states import pieces_of, recurrent_states, with_spare_states

SHAPES = ((3, 5), (4, 2))
NAMES = ("a", "b")
SAMPLES = ("s1", "s2", "s3")
# For each sample, the blocks of its state and of the copy.
BLOCKS = np.array([[1, 2], [3, 6], [5, 4]], np.int32)

one = MambaSpec(8, SHAPES, (torch.float32,) * 2)
spare = with_spare_states(dict.fromkeys(NAMES, one))


class Table:
    """Block table of a group, with the part that is read here."""

    def __init__(self) -> None:
        self.block_table = SimpleNamespace(np=BLOCKS)


@pytest.mark.parametrize("spec", [spare["a"], UniformTypeKVCacheSpecs(8, spare)], ids=["one spec", "packed"])
def test_the_states_of_all_layers_are_copied_and_taken_back(
    spec: KVCacheSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What vLLM's CPU platform registers for its kernel; after numba was imported it can register nothing.
    monkeypatch.setattr(module, "batch_memcpy", _batch_memcpy_impl)
    layers = {name: SimpleNamespace(kv_cache=[torch.rand(7, *shape) for shape in SHAPES]) for name in NAMES}
    config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=NAMES)])
    tables = [Table()]
    states = recurrent_states(config, layers, tables, torch.device("cpu"))
    assert states is not None
    caches = [cache for layer in layers.values() for cache in layer.kv_cache]
    before = [cache.clone() for cache in caches]

    states.keep(tables, SAMPLES, [0, 2])
    for cache in caches:
        cache[[1, 3, 5]] += 1
    states.take_back(tables, SAMPLES, [2])

    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[[2, 5, 4]], old[[1, 5, 5]])
        # The other states are as the step left them, and the blocks without a copy as they were.
        assert torch.equal(cache[[1, 3]], old[[1, 3]] + 1)
        assert torch.equal(cache[[0, 6]], old[[0, 6]])


def test_states_without_room_for_a_copy_are_left_alone() -> None:
    config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=one, layer_names=NAMES)])
    assert recurrent_states(config, {}, [], torch.device("cpu")) is None


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=5), st.integers(1, 300))
def test_pieces_are_all_bytes_of_all_tensors_once(sizes: list[int], most_bytes: int) -> None:
    pieces = pieces_of(np.array(sizes, np.int64), most_bytes)
    covered = [(index, offset + i) for index, offset, size in pieces.tolist() for i in range(size)]
    assert covered == [(index, i) for index, size in enumerate(sizes) for i in range(size)]
    assert pieces[:, 2].max() <= most_bytes
