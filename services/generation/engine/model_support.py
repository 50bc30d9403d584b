"""Decide which features beyond plain decoding an engine allows for its model. Pure.

This is an allow-list: a feature that is not known to give the policy's samples is refused with a reason, and the
engine decodes plainly without it. A refusal never keeps an instance from starting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from services.contracts.errors import KEEPING_KV


class Feature(StrEnum):
    """Feature of an engine that a model may not allow."""

    DRAFTS = "drafts"
    TREES = "trees"
    QUANTIZED = "quantized"
    EAGLE3 = "eagle3"
    PREGENERATION = "pregeneration"
    MOVES = "moves"
    RESUMING = "resuming"
    PREFIX_CACHE = "prefix_cache"
    KEEP_KV = KEEPING_KV
    """Samples can keep their KV while the weights change (kept_kv.py)."""
    SLEEP = "sleep"
    """Allowed for every model: an engine sleeps only when it is empty, and drops all KV."""


EXACT_KINDS = frozenset({"FullAttentionSpec", "SlidingWindowSpec"})
"""vLLM's kinds of KV cache that are known to be exact with drafts: no later token reads the KV of a refused draft,
because the KV of each position is written again before it is read. Models with attention sinks have these kinds."""
COPIED_KINDS = frozenset({"MambaSpec"})
"""Kinds of recurrent state that are exact with drafts because the V1 runner copies them before a drafted step
(recurrent_states.py). Mamba-2's only: it is the same after several tokens at once as after one by one."""
MOVABLE_KINDS = frozenset({"FullAttentionSpec"})
"""Kinds whose blocks can be moved: none of them is dropped, and they hold only KV of their positions."""
RESUMABLE_KINDS = EXACT_KINDS | COPIED_KINDS
"""Kinds that are the same after a prefill of prompt and response as after decoding. Of recurrent states, only
Mamba-2's is known to be."""
KEPT_KINDS = EXACT_KINDS
"""Kinds whose KV samples keep while weights change: each position has its own KV, which is computed once."""
_ATTENTION_DTYPES = frozenset({"auto", "float16", "bfloat16", "float32"})
_DRAFTED_DTYPES = _ATTENTION_DTYPES | {"fp8", "fp8_e4m3", "fp8_e5m2"}
_NEED_DRAFTS = (Feature.TREES, Feature.QUANTIZED, Feature.EAGLE3, Feature.PREGENERATION)
_STATE = "a layer keeps a state of all tokens so far, which a refused draft would leave changed"

_Rule = tuple[bool, str]


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """Traits of an engine: its device, its model runner, its model and its KV.

    `kinds` and `hidden_states` are None until the model is built, `groups` until its KV is allocated.
    """

    device: str
    v2: bool = False
    coupled: bool = True
    eagle3: bool = False
    """An EAGLE-3 head reads the target's hidden states of each token."""
    kinds: frozenset[str] | None = None
    """Names of vLLM's KV cache specs of all layers. States other than Mamba-2's have their type after a slash."""
    groups: int | None = None
    """Number of kinds of KV, each with its block table."""
    hidden_states: bool | None = None
    """The model can return the hidden states of its layers."""
    latent: bool = False
    """Attention over latent KV (MLA)."""
    window: bool = False
    """Some layer does not see the whole context."""
    recurrent: bool = False
    """Some layer has a recurrent state, or nothing at all, instead of KV."""
    short_states: bool = False
    """vLLM keeps the last inputs of a recurrent state, and seldom the state itself."""
    encoder: bool = False
    positions: bool = False
    """Positions of several dimensions."""
    lookahead: bool = False
    """Some tokens see later ones."""
    experts: bool = False
    partial_hits: bool = False
    """Prefixes are found in parts of blocks, because kinds of KV have blocks of several sizes."""
    kv_dtype: str = "auto"
    pipeline: int = 1
    context_parallel: int = 1


@dataclass(frozen=True, slots=True)
class ModelSupport:
    """Features that an engine allows for its model, given as the refused ones."""

    refused: Mapping[Feature, str] = field(default_factory=dict)
    """Reason for each refused feature."""

    def allows(self, feature: Feature) -> bool:
        """Return True if the engine has a feature."""
        return feature not in self.refused

    def without(self, feature: Feature, reason: str) -> ModelSupport:
        """Return the support without a feature, and without the features that need it."""
        more = (feature, *_NEED_DRAFTS) if feature is Feature.DRAFTS else (feature,)
        return replace(self, refused=dict.fromkeys(more, reason) | dict(self.refused))

    def by_name(self) -> dict[str, str]:
        """Return the reasons by the names of the features, as they are sent and stored."""
        return {feature.value: reason for feature, reason in self.refused.items()}

    def __str__(self) -> str:
        """Return the refused features, grouped by reason; "" if there are none."""
        return "; ".join(by_reason(self.by_name()))


def by_reason(refused: Mapping[str, str]) -> list[str]:
    """Return a line `features: reason` for each reason, given the reason of each feature."""
    names: dict[str, list[str]] = {}
    for feature, reason in refused.items():
        names.setdefault(reason, []).append(feature)
    return [f"{', '.join(each)}: {reason}" for reason, each in names.items()]


def model_support(engine: EngineTraits) -> ModelSupport:
    """Return the features of an engine by the traits known so far. A later answer may only refuse more."""
    found = {
        Feature.DRAFTS: _first(_of_drafts(engine)),
        Feature.MOVES: _first(_of_moves(engine)),
        Feature.RESUMING: _first(_of_resuming(engine)),
        Feature.KEEP_KV: _first(_of_kept_kv(engine)),
        Feature.SLEEP: "",
        Feature.PREFIX_CACHE: _first([(engine.recurrent, "no test shows that cached states are exact")]),
    }
    own = {
        Feature.TREES: _of_trees(engine),
        Feature.QUANTIZED: _of_quantized(engine),
        Feature.EAGLE3: _of_eagle3(engine),
        Feature.PREGENERATION: (),
    }
    found |= {feature: found[Feature.DRAFTS] or _first(own[feature]) for feature in _NEED_DRAFTS}
    return ModelSupport({feature: found[feature] for feature in Feature if found[feature]})


def worker_refusal(*, ours: bool, kinds: int, whole_graphs: bool, fused_output: bool) -> str:
    """Return why a CUDA worker verifies only chains; "" if it verifies trees. Call it after graphs are captured.

    Args:
        ours: our kernel computes the short steps of every attention layer.
        kinds: number of kinds of KV, each with its block table.
        whole_graphs: graphs of whole steps are captured for more than plain decoding. They contain the attention of
            the capture, which has no mask.
        fused_output: vLLM may have attention write its output quantized, which our kernel cannot.
    """
    return _first(
        (
            (not ours, "the attention of a layer is not our kernel's"),
            (kinds != 1, f"the model has {kinds} kinds of KV"),
            (whole_graphs, "CUDA graphs hold whole steps that verify drafts"),
            (fused_output, "attention quantizes its output"),
        )
    )


def _first(rules: Iterable[_Rule]) -> str:
    return next((reason for applies, reason in rules if applies), "")


def _recurrent(engine: EngineTraits) -> bool:
    return engine.recurrent or any(kind.startswith("MambaSpec") for kind in engine.kinds or ())


def _others(kinds: frozenset[str] | None, known: frozenset[str]) -> str:
    return ", ".join(sorted((kinds or frozenset()) - known))


def _of_drafts(engine: EngineTraits) -> Iterable[_Rule]:
    known = EXACT_KINDS if engine.v2 else EXACT_KINDS | COPIED_KINDS
    others = _others(engine.kinds, known)
    return (
        (not engine.coupled, "vLLM's own sampler takes no drafts"),
        ((engine.v2 and engine.recurrent) or "MambaSpec" in others, _STATE),
        (engine.short_states, "vLLM keeps the last inputs of a state in place of the state (use_replayssm)"),
        (engine.latent, "no test shows that drafts are exact with latent attention"),
        (bool(others), f"no test shows that drafts are exact with KV of the kind {others}"),
        (engine.kinds == frozenset(), "no layer has KV"),
        (engine.encoder, "the model has an encoder"),
        (engine.positions, "no test shows that drafts are exact with positions of several dimensions"),
        (engine.kv_dtype not in _DRAFTED_DTYPES, f"KV is {engine.kv_dtype}"),
        (engine.pipeline > 1, "layers are divided into stages"),
        (engine.context_parallel > 1, "contexts are divided among devices"),
    )


def _of_trees(engine: EngineTraits) -> Iterable[_Rule]:
    return (
        (engine.device not in ("cpu", "cuda"), f"no attention computes branches on {engine.device}"),
        (engine.v2, "the V2 runner verifies chains"),
        (_recurrent(engine), "a layer keeps one state of a sample, not one of each branch"),
        (engine.eagle3, "the EAGLE-3 head reads hidden states of chains"),
        (
            engine.window or "SlidingWindowSpec" in (engine.kinds or ()),
            "a layer of the model does not see the whole context",
        ),
        (engine.lookahead, "some tokens of a prompt see later ones"),
        (engine.kv_dtype not in _ATTENTION_DTYPES, f"KV is {engine.kv_dtype}"),
    )


def _of_quantized(engine: EngineTraits) -> Iterable[_Rule]:
    return (
        (engine.v2, "the V2 runner has no draft models"),
        (_recurrent(engine), "the copy would advance the state of the model's own layers"),
        (engine.experts, "a mixture of experts has no quantized copy"),
    )


def _of_eagle3(engine: EngineTraits) -> Iterable[_Rule]:
    return (
        (engine.v2, "the V2 runner has no draft models"),
        (engine.hidden_states is False, "the model cannot return its hidden states"),
        (len(engine.kinds or ()) > 1, "the model has several kinds of KV"),
    )


def _of_moves(engine: EngineTraits) -> Iterable[_Rule]:
    others, groups = _others(engine.kinds, MOVABLE_KINDS), 1 if engine.groups is None else engine.groups
    return (
        (not engine.coupled, "samples of vLLM's own sampler are not moved"),
        (engine.recurrent or "MambaSpec" in others, "a layer keeps a state beside its KV"),
        (
            engine.window if engine.kinds is None else "SlidingWindowSpec" in others,
            "KV behind a window is dropped",
        ),
        (engine.latent, "no test shows that latent KV moves"),
        (bool(others), f"no test shows that KV of the kind {others} moves"),
        (engine.kinds == frozenset(), "no layer has KV"),
        (groups != 1, f"the model has {groups} kinds of KV"),
        (engine.positions, "positions have several dimensions"),
        (engine.pipeline != 1, "the model's layers are on several devices"),
    )


def _of_resuming(engine: EngineTraits) -> Iterable[_Rule]:
    # A sample is resumed by a prefill of all its tokens, as vLLM does after a preemption.
    others = _others(engine.kinds, RESUMABLE_KINDS)
    return (
        (not engine.coupled, "samples of vLLM's own sampler are not resumed"),
        (engine.encoder, "the model has an encoder"),
        (engine.positions, "the positions of a resumed sample have several dimensions"),
        (engine.latent, "no test shows that latent KV of a prefill is that of decoding"),
        (bool(others), f"no test shows that KV of the kind {others} is after a prefill as after decoding"),
    )


def _of_kept_kv(engine: EngineTraits) -> Iterable[_Rule]:
    others = _others(engine.kinds, KEPT_KINDS)
    return (
        (not engine.coupled, "vLLM's own sampler does not mark samples whose KV is of several versions"),
        (_recurrent(engine), "no test shows what a recurrent state of several versions gives"),
        (engine.latent, "no test shows that latent KV outlives its weights"),
        (bool(others), f"no test shows that KV of the kind {others} outlives its weights"),
        (engine.kinds == frozenset(), "no layer has KV"),
        (engine.encoder, "the model has an encoder"),
        (engine.positions, "positions have several dimensions"),
        (engine.partial_hits, "prefixes are found in parts of blocks"),
        (
            engine.kv_dtype not in _ATTENTION_DTYPES,
            f"KV is {engine.kv_dtype}, whose scales change with the weights",
        ),
        (engine.pipeline > 1, "layers are divided into stages"),
        (engine.context_parallel > 1, "contexts are divided among devices"),
    )
