"""First steps before an instance reports ready: vLLM's first run of every shape is seconds slow."""

from __future__ import annotations

from dataclasses import replace

from services.contracts.sampling import Sampling
from services.generation.engine.core import Engine
from services.generation.engine.types import EngineRequest

_PROMPT_TOKENS = 8
_RESPONSE_TOKENS = 4


def warm_up(engine: Engine) -> None:
    """Generate a few tokens at batch 1, a middle size and the largest, then forget their KV.

    With masks and penalties too: the sampler has kernels for each, which a device compiles when first asked.
    """
    plain = Sampling(max_tokens=_RESPONSE_TOKENS, ignore_eos=True)
    masked = replace(plain, top_k=5, top_p=0.9)
    penalised = replace(plain, presence_penalty=0.5)
    length = min(_PROMPT_TOKENS, engine.limits.max_model_len - _RESPONSE_TOKENS)
    for batch, sampling in ((1, plain), (2, penalised), (8, masked), (64, plain)):
        for i in range(batch):
            prompt = tuple((i + j) % engine.limits.vocab_size for j in range(length))
            engine.add(EngineRequest(f"warm-up-{batch}-{i}", prompt, (), sampling, i))
        while engine.has_work:
            for drafts in engine.model_drafts.values():
                drafts.propose({state.sample_id: 1 for state in engine.decoding()})
            engine.step()
    engine.forget_kv()
