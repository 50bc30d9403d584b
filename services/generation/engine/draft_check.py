"""Check at an engine's start that drafts do not change what its model says.

A few samples are decoded plainly, and again with drafts that are wrong on purpose. Where the two differ by more
than rounding (draft_agreement.py) the engine decodes plainly from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.contracts.sampling import Sampling
from services.generation.engine.draft_agreement import Decoded, disagreement
from services.generation.engine.model_support import Feature
from services.generation.engine.types import EngineRequest, SampleStep

if TYPE_CHECKING:
    from services.generation.engine.core import Engine

_log = logging.getLogger(__name__)
# Fifteen steps or so for each way of decoding: half a second of a model of 70B.
_SAMPLES, _PROMPT_TOKENS, _TOKENS, _LIKELIEST = 4, 24, 12, 20
_DRAFT_TOKENS = 3
# A model with shorter samples has no room for a refused draft and tokens behind it.
_SHORTEST = 12
# Spreads the tokens of prompts over the vocabulary.
_STRIDE = 7919


def check_drafts(engine: Engine) -> None:
    """Refuse drafts, or trees of them, where they change what the model says. The engine is idle, and so again."""
    if not engine.support.allows(Feature.DRAFTS) or engine.limits.max_model_len < _SHORTEST:
        return
    plain = _Run(engine, "plain").decode()
    for feature in (Feature.DRAFTS, Feature.TREES) if engine.trees else (Feature.DRAFTS,):
        if reason := _difference(engine, plain, feature):
            _log.error("features_refused: %s: %s", feature.value, reason)
            engine.refuse(feature, reason)
            return


def _difference(engine: Engine, plain: Sequence[Decoded], feature: Feature) -> str:
    run = _Run(engine, feature.value, plain)
    try:
        drafted = run.decode()
    except Exception as error:  # Of vLLM, or of a kernel.
        _log.exception("draft_check_failed")
        run.end()
        return f"a step with drafts failed: {type(error).__name__}: {error}"
    return disagreement(plain, drafted, engine.dtype)


class _Run:
    """Samples that are decoded together; with drafts where their plain responses are given."""

    def __init__(self, engine: Engine, name: str, plain: Sequence[Decoded] = ()) -> None:
        self._engine = engine
        self._vocab = engine.limits.vocab_size
        self._plain = plain
        self._trees = name == Feature.TREES
        count = min(_SAMPLES, engine.max_running)
        self._places = {f"draft-check-{name}-{place}": place for place in range(count)}
        self._found = [Decoded() for _ in range(count)]
        self._likeliest = min(_LIKELIEST, self._vocab)

    def decode(self) -> list[Decoded]:
        """Return what the samples become."""
        engine, longest = self._engine, self._engine.limits.max_model_len
        count = min(_TOKENS, longest // 2)
        sampling = Sampling(max_tokens=count, ignore_eos=True, top_logprobs=self._likeliest)
        length = min(_PROMPT_TOKENS, longest - count)
        for sample_id, place in self._places.items():
            prompt = tuple((place * length + i) * _STRIDE % self._vocab for i in range(length))
            engine.add(EngineRequest(sample_id, prompt, (), sampling, place))
        while engine.has_work:
            if self._plain:
                self._put_drafts()
            for step in engine.step():
                self._record(step)
        engine.forget_kv()
        return self._found

    def end(self) -> None:
        """End the samples of a run that failed."""
        self._engine.abort(self._places)
        self._engine.forget_kv(preempt=True)

    def _put_drafts(self) -> None:
        drafts, parents = dict[str, list[int]](), dict[str, list[int]]()
        for state in self._engine.decoding():
            place, here = self._places[state.sample_id], len(state.response)
            right = self._plain[place].tokens[here : here + _DRAFT_TOKENS]
            if min(state.room, len(right)) < _DRAFT_TOKENS:
                continue
            wrong = [(token + 1) % self._vocab for token in right]
            if self._trees:
                drafts[state.sample_id], parents[state.sample_id] = [wrong[0], *right[:2]], [-1, -1, 1]
            else:
                # In the first step all are wrong.
                count = (place + here) % _DRAFT_TOKENS if here > 1 else 0
                drafts[state.sample_id] = [*right[:count], *wrong[count:]]
        self._engine.put_drafts(drafts, parents)

    def _record(self, step: SampleStep) -> None:
        found, each = self._found[self._places[step.sample_id]], self._likeliest
        found.tokens.extend(step.token_ids)
        for i in range(0, len(step.top_token_ids), each):
            row = zip(step.top_token_ids[i : i + each], step.top_logprobs[i : i + each], strict=True)
            found.likeliest.append(dict(row))
