"""What an engine does for its model: an allow-list, by kinds of KV cache and by configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.generation.engine.model_support import (
    COPIED_KINDS,
    EXACT_KINDS,
    KEPT_KINDS,
    MOVABLE_KINDS,
    RESUMABLE_KINDS,
    EngineTraits,
    Feature,
    ModelSupport,
    model_support,
    worker_refusal,
)

FULL, WINDOW = "FullAttentionSpec", "SlidingWindowSpec"
DRAFTED = {Feature.DRAFTS, Feature.TREES, Feature.QUANTIZED, Feature.EAGLE3, Feature.PREGENERATION}
KNOWN = EngineTraits("cpu", kinds=frozenset({FULL}), groups=1, hidden_states=True)
STATE = "a state of all tokens so far"
# Of a model with recurrent states, beside what its drafts and moves are refused.
STATEFUL = {Feature.PREFIX_CACHE, Feature.KEEP_KV}
# Every class of KV cache spec that vLLM 0.32 has, but those that are exact with drafts.
OTHER_KINDS = [
    "MambaSpec/gdn_attn", "MambaSpec/short_conv",
    "MLAAttentionSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec", "SinkFullAttentionSpec",
    "RSWASpec", "CircularBufferSpec", "HiddenStateCacheSpec", "HiSparseHotSpec", "HiSparseResidentSpec",
    "EncoderOnlyAttentionSpec", "CrossAttentionSpec", "AttentionSpec", "SomeSpecOfALaterVersion",
]  # fmt: skip


def refused(**changes: Any) -> Mapping[Feature, str]:
    return model_support(replace(KNOWN, **changes)).refused


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_plain_decoder_is_refused_nothing(device: str) -> None:
    assert refused(device=device) == {}
    # Nor before it is loaded, on the same configuration.
    assert model_support(EngineTraits(device)).refused == {}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_kv_that_is_not_known_to_be_exact_decodes_plainly_where_it_is(kind: str) -> None:
    for kinds in ({kind}, {kind, FULL}, {kind, FULL, WINDOW}):
        found = refused(kinds=frozenset(kinds))
        assert {*DRAFTED, Feature.MOVES, Feature.RESUMING, Feature.KEEP_KV} == found.keys()
        assert (STATE if "MambaSpec" in kind else kind) in found[Feature.DRAFTS]


def test_windows_are_exact_with_chains_and_stay_where_they_are() -> None:
    found = refused(kinds=frozenset({FULL, WINDOW}), groups=2)
    assert found.keys() == {Feature.TREES, Feature.EAGLE3, Feature.MOVES}
    assert refused(kinds=frozenset({WINDOW})).keys() == {Feature.TREES, Feature.MOVES}


def test_states_that_are_copied_are_exact_with_chains_on_v1() -> None:
    hybrid = {"recurrent": True, "kinds": frozenset({FULL, "MambaSpec"}), "groups": 2}
    own = {Feature.TREES, Feature.QUANTIZED, Feature.EAGLE3, Feature.MOVES, *STATEFUL}
    assert refused(**hybrid).keys() == own
    for changed in ({"v2": True}, {"short_states": True}):
        assert refused(**hybrid | changed).keys() == own | DRAFTED


@pytest.mark.parametrize(
    ("changes", "features"),
    [
        ({"recurrent": True}, {Feature.TREES, Feature.QUANTIZED, Feature.MOVES, *STATEFUL}),
        ({"short_states": True}, DRAFTED),
        ({"coupled": False}, {*DRAFTED, Feature.MOVES, Feature.RESUMING, Feature.KEEP_KV}),
        ({"encoder": True}, {*DRAFTED, Feature.RESUMING, Feature.KEEP_KV}),
        ({"positions": True}, {*DRAFTED, Feature.MOVES, Feature.RESUMING, Feature.KEEP_KV}),
        ({"latent": True}, {*DRAFTED, Feature.MOVES, Feature.RESUMING, Feature.KEEP_KV}),
        ({"kinds": frozenset()}, {*DRAFTED, Feature.MOVES, Feature.KEEP_KV}),
        ({"kv_dtype": "nvfp4"}, {*DRAFTED, Feature.KEEP_KV}),
        ({"pipeline": 2}, {*DRAFTED, Feature.MOVES, Feature.KEEP_KV}),
        ({"context_parallel": 2}, {*DRAFTED, Feature.KEEP_KV}),
        ({"device": "xpu"}, {Feature.TREES}),
        ({"kv_dtype": "fp8"}, {Feature.TREES, Feature.KEEP_KV}),
        ({"eagle3": True}, {Feature.TREES}),
        ({"window": True}, {Feature.TREES}),
        ({"window": True, "kinds": None}, {Feature.TREES, Feature.MOVES}),
        ({"lookahead": True}, {Feature.TREES}),
        ({"v2": True}, {Feature.TREES, Feature.QUANTIZED, Feature.EAGLE3}),
        ({"experts": True}, {Feature.QUANTIZED}),
        ({"hidden_states": False}, {Feature.EAGLE3}),
        ({"groups": 2}, {Feature.MOVES}),
        ({"partial_hits": True}, {Feature.KEEP_KV}),
    ],
)
def test_each_trait_refuses_alone_what_it_must(changes: dict[str, Any], features: set[Feature]) -> None:
    found = refused(**changes)
    assert found.keys() == features
    assert all(found.values())


traits = st.builds(
    EngineTraits,
    device=st.sampled_from(["cpu", "cuda", "xpu"]),
    kinds=st.none() | st.frozensets(st.sampled_from([FULL, WINDOW, "MambaSpec", *OTHER_KINDS]), max_size=3),
    groups=st.none() | st.integers(0, 3),
    hidden_states=st.none() | st.booleans(),
    kv_dtype=st.sampled_from(["auto", "fp8", "nvfp4"]),
    **{
        name: st.booleans()
        for name in (
            "v2",
            "coupled",
            "eagle3",
            "latent",
            "window",
            "recurrent",
            "short_states",
            "encoder",
            "positions",
            "partial_hits",
        )
    },
)


@given(traits)
def test_no_combination_allows_what_is_not_known(engine: EngineTraits) -> None:
    support = model_support(engine)
    if support.allows(Feature.DRAFTS):
        assert not (engine.recurrent and engine.v2)
        known = EXACT_KINDS if engine.v2 else EXACT_KINDS | COPIED_KINDS
        assert engine.kinds is None or (engine.kinds and engine.kinds <= known)
    else:
        assert support.refused.keys() >= DRAFTED
    if support.allows(Feature.RESUMING):
        assert not engine.latent
        assert engine.kinds is None or engine.kinds <= RESUMABLE_KINDS
    if support.allows(Feature.MOVES):
        assert engine.kinds is None or engine.kinds <= MOVABLE_KINDS
    if support.allows(Feature.KEEP_KV):
        assert not engine.recurrent
        assert not engine.latent
        assert not engine.partial_hits
        assert engine.kv_dtype == "auto"
        assert engine.kinds is None or (engine.kinds and engine.kinds <= KEPT_KINDS)
    # What is known later refuses more, never less.
    before = model_support(replace(engine, kinds=None, groups=None, hidden_states=None)).refused.keys()
    assert before - {Feature.MOVES} <= support.refused.keys()


def test_without_drafts_there_is_nothing_that_needs_them() -> None:
    support = ModelSupport({Feature.TREES: "why not"}).without(Feature.DRAFTS, "off")
    assert support.refused.keys() == DRAFTED
    assert support.refused[Feature.TREES] == "why not"
    assert str(support) == "drafts, quantized, eagle3, pregeneration: off; trees: why not"
    assert str(ModelSupport()) == ""
    assert ModelSupport().without(Feature.TREES, "off").refused == {Feature.TREES: "off"}


def test_each_reason_refuses_a_worker_alone() -> None:
    plain = {"ours": True, "kinds": 1, "whole_graphs": False, "fused_output": False}
    assert worker_refusal(**plain) == ""  # type: ignore[arg-type]
    for changed, reason in (
        ({"ours": False}, "not our kernel's"), ({"kinds": 2}, "2 kinds"), ({"kinds": 0}, "0 kinds"),
        ({"whole_graphs": True}, "graphs"), ({"fused_output": True}, "quantizes"),
    ):  # fmt: skip
        assert reason in worker_refusal(**plain | changed)  # type: ignore[arg-type]
