"""First steps before an instance reports ready: vLLM's first run of every shape is seconds slow."""

from __future__ import annotations

from services.contracts.sampling import Sampling
from services.generation.engine.core import Engine
from services.generation.engine.types import EngineRequest

_PROMPT_TOKENS = 8
_RESPONSE_TOKENS = 4


def warm_up(engine: Engine) -> None:
    """Generate a few tokens at batch 1, a middle size and the largest, then forget their KV."""
    sampling = Sampling(max_tokens=_RESPONSE_TOKENS, ignore_eos=True)
    length = min(_PROMPT_TOKENS, engine.limits.max_model_len - _RESPONSE_TOKENS)
    for batch in (1, 8, 64):
        for i in range(batch):
            prompt = tuple((i + j) % engine.limits.vocab_size for j in range(length))
            engine.add(EngineRequest(f"warm-up-{batch}-{i}", prompt, (), sampling, i))
        while engine.has_work:
            for drafts in engine.model_drafts.values():
                drafts.propose({state.sample_id: 1 for state in engine.decoding()})
            engine.step()
    engine.forget_kv()
