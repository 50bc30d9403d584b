"""First steps before an instance reports ready: vLLM's first run of every shape is seconds slow."""

from __future__ import annotations

from dataclasses import replace

from services.contracts.sampling import Sampling
from services.generation.engine.core import Engine
from services.generation.engine.types import EngineRequest, Verifier

_PROMPT_TOKENS = 8
_RESPONSE_TOKENS = 4


def warm_up(engine: Engine) -> None:
    """Generate a few tokens at batch 1, a middle size and the largest, then forget their KV.

    With masks, penalties and proposals too: a device compiles the sampler's kernels for each when first asked.
    """
    plain = Sampling(max_tokens=_RESPONSE_TOKENS, ignore_eos=True)
    masked = replace(plain, top_k=5, top_p=0.9, min_p=0.01)
    penalised = replace(plain, presence_penalty=0.5)
    length = min(_PROMPT_TOKENS, engine.limits.max_model_len - _RESPONSE_TOKENS)
    own, proposing = Verifier.COUPLED, Verifier.REJECTION
    batches = [(1, plain, own), (2, penalised, own), (8, masked, own), (64, plain, own)]
    batches += [(3, plain, proposing), (4, penalised, proposing)]
    for batch, sampling, verifier in batches:
        for i in range(batch):
            prompt = tuple((i + j) % engine.limits.vocab_size for j in range(length))
            engine.add(EngineRequest(f"warm-up-{batch}-{i}", prompt, (), sampling, i, verifier=verifier))
        while engine.has_work:
            for drafts in engine.model_drafts.values():
                drafts.propose({state.sample_id: 1 for state in engine.decoding()})
            engine.step()
    engine.forget_kv()
