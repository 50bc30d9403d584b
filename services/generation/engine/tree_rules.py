"""Decide which engines and which samples verify draft trees. Pure.

What is refused verifies the primary chain of each draft, as if there were no branches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernels.short_query_attention.inputs import LONGEST_TREE
from services.generation.engine.sampling.noise import CACHED_KEY, NOISE_KEY, RECORDED_KEY
from services.generation.engine.types import Verifier

MOST_DRAFTED = LONGEST_TREE - 1
"""Tokens of the largest tree: a mask has a bit for each, and one for the root."""
_PLAIN_KV = ("auto", "float16", "bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class TreeTraits:
    """Traits of an engine: its device, its model runner, and what its model and its KV are like."""

    device: str
    v2: bool = False
    coupled: bool = True
    features: bool = False
    """A draft model reads the target's hidden states of each token."""
    latent: bool = False
    """Attention over latent KV (MLA)."""
    window: bool = False
    """Some layer does not see the whole context."""
    recurrent: bool = False
    """Some layer has a state, or none at all, instead of KV."""
    encoder: bool = False
    positions: bool = False
    """Positions of several dimensions."""
    lookahead: bool = False
    """Some tokens see later ones."""
    kv_dtype: str = "auto"
    pipeline: int = 1
    context_parallel: int = 1


def engine_refusal(engine: TreeTraits) -> str | None:
    """Return why an engine verifies chains only; None if it can verify trees."""
    reasons = (
        (engine.device not in ("cpu", "cuda"), f"no attention computes branches on {engine.device}"),
        (not engine.coupled, "vLLM's own sampler verifies chains"),
        (engine.v2, "the V2 runner verifies chains"),
        (engine.features, "the EAGLE-3 head reads hidden states of chains"),
        (engine.latent, "the model has latent attention"),
        (engine.window, "a layer of the model does not see the whole context"),
        (engine.recurrent, "a layer of the model keeps a state of a chain"),
        (engine.encoder, "the model has an encoder"),
        (engine.positions, "positions have several dimensions"),
        (engine.lookahead, "some tokens of a prompt see later ones"),
        (engine.kv_dtype not in _PLAIN_KV, f"KV is {engine.kv_dtype}"),
        (engine.pipeline > 1, "layers are divided into stages"),
        (engine.context_parallel > 1, "contexts are divided among devices"),
    )
    return next((reason for applies, reason in reasons if applies), None)


def worker_refusal(*, ours: bool, kinds: int, whole_graphs: bool, fused_output: bool) -> str:
    """Return why a CUDA worker, its model built and its graphs captured, verifies chains only; "" if it needs not.

    Args:
        ours: our kernel computes the short steps of every attention layer.
        kinds: of KV, with a block table each.
        whole_graphs: graphs of whole steps are captured for more than plain decoding. They hold the attention of
            the capture, which knows no mask.
        fused_output: attention may be told to write its output quantized, which our kernel cannot.
    """
    reasons = (
        (not ours, "the attention of a layer is not our kernel's"),
        (kinds != 1, f"the model has {kinds} kinds of KV"),
        (whole_graphs, "CUDA graphs hold whole steps that verify drafts"),
        (fused_output, "attention quantizes its output"),
    )
    return next((reason for applies, reason in reasons if applies), "")


def sample_refusal(extra: Mapping[str, Any]) -> str | None:
    """Return why a sample verifies chains only; None if it can verify trees.

    Args:
        extra: what travels with it to the sampler (sampling/noise.py).
    """
    noise = extra[NOISE_KEY]
    penalties = (noise["presence_penalty"], noise["frequency_penalty"], noise["repetition_penalty"] - 1)
    reasons = (
        (
            noise["verifier"] is not Verifier.COUPLED or CACHED_KEY in extra or RECORDED_KEY in extra,
            "it is not verified by coupled sampling alone",
        ),
        (bool(noise["json_schema"]), "it follows a grammar"),
        (any(penalties), "it has penalties"),
    )
    return next((reason for applies, reason in reasons if applies), None)
