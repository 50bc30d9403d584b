"""What a sample's tokens and log-probabilities must be, from transformers and the reference of coupled sampling.

Shares nothing with the engine: the forward pass is transformers', the penalties and masks are written out here, and
the token is the plain arg-max of `coupled_argmax_reference`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kernels.coupled_sampler.noise import gumbel
from services.generation.engine.types import EngineRequest

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Judgement:
    """One response, judged position by position, [n] each.

    `expected` is the token that the oracle picks after the response's own tokens before it; `gap` by how much its
    score beats that of the response's token (0 where they are the same).
    """

    expected: list[int]
    gap: list[float]
    raw: list[float]
    processed: list[float]


class Oracle:
    """A model in transformers, float32 on one thread."""

    def __init__(self, folder: Path, end_tokens: Sequence[int] = ()) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._end_tokens = tuple(end_tokens)
        self._folder = folder
        self._compiled: dict[str, Any] = {}

    def allowed(self, request: EngineRequest, output: list[int]) -> npt.NDArray[np.bool_]:
        """Return which tokens the schema of a request allows after an output, [V]; by a new matcher each time."""
        import xgrammar

        size, schema = self._model.config.vocab_size, request.sampling.json_schema
        if schema not in self._compiled:
            tokenizer = AutoTokenizer.from_pretrained(self._folder)
            vocabulary = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
            self._compiled[schema] = xgrammar.GrammarCompiler(vocabulary).compile_json_schema(schema)
        matcher = xgrammar.GrammarMatcher(self._compiled[schema], override_stop_tokens=list(self._end_tokens))
        assert all(matcher.accept_token(token) for token in output)
        mask = xgrammar.allocate_token_bitmask(1, size)
        matcher.fill_next_token_bitmask(mask)
        return np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[:size].astype(bool)

    def logits(self, tokens: Sequence[int]) -> FloatArray:
        """Return the logits after each token, [n, V]."""
        with torch.inference_mode():
            found = self._model(torch.tensor([list(tokens)])).logits[0]
        result: FloatArray = found.double().numpy()
        return result

    def stream(self, prompt: Sequence[int], response: Sequence[int]) -> Iterator[FloatArray]:
        """The logits of each next token, [V], of a response that grows by one token for each."""
        cache, news = None, list(prompt)
        while True:
            with torch.inference_mode():
                made = self._model(torch.tensor([news]), past_key_values=cache, use_cache=True)
            cache = made.past_key_values
            yield made.logits[0, -1].double().numpy()
            news = [response[-1]]

    def judge(self, request: EngineRequest, response: Sequence[int]) -> Judgement:
        """Judge the whole response of a request, prefix included."""
        if not response:
            return Judgement([], [], [], [])
        logits = self.logits([*request.prompt, *response[:-1]])[len(request.prompt) - 1 :]
        rows = [self._judge_row(request, response, i, row) for i, row in enumerate(logits)]
        return Judgement(*(list(column) for column in zip(*rows, strict=True)))

    def judge_on_kv(
        self, before: Oracle, request: EngineRequest, response: Sequence[int], begin: int
    ) -> Judgement:
        """Judge a response from token `begin` on, which this model continued with KV that another one had computed.

        Only the tokens before the last one of these had KV then.
        """
        known, news = [*request.prompt, *response[: begin - 1]], response[begin - 1 : -1]
        with torch.inference_mode():
            cache = before._model(torch.tensor([known]), use_cache=True).past_key_values
            found = self._model(torch.tensor([list(news)]), past_key_values=cache, use_cache=True)
        logits = found.logits[0].double().numpy()
        rows = [self._judge_row(request, response, begin + i, row) for i, row in enumerate(logits)]
        return Judgement(*(list(column) for column in zip(*rows, strict=True)))

    def _judge_row(
        self, request: EngineRequest, response: Sequence[int], position: int, row: FloatArray
    ) -> tuple[int, float, float, float]:
        token, sampling = response[position], request.sampling
        processed = self.process(request, list(response[:position]), row)
        scores = processed
        if sampling.temperature > 0:
            scores = processed + gumbel(request.seed, position, len(row)).astype(np.float64)
        expected = int(scores.argmax())
        gap = float(scores[expected] - scores[token])
        return expected, gap, log_softmax(row)[token], log_softmax(processed)[token]

    def process(self, request: EngineRequest, output: list[int], row: FloatArray) -> FloatArray:
        """Penalties, end tokens, temperature, min-p, top-k, top-p: vLLM's order."""
        sampling, logits = request.sampling, row.copy()
        seen = sorted({*request.prompt, *output})
        factor = sampling.repetition_penalty
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / factor, logits[seen] * factor)
        counts = np.bincount(output, minlength=len(row)) if output else np.zeros(len(row))
        logits -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
        if len(output) < sampling.min_tokens:
            own = () if sampling.ignore_eos else self._end_tokens
            logits[[*sampling.stop_token_ids, *own]] = -np.inf
        if sampling.json_schema:
            logits[~self.allowed(request, output)] = -np.inf
        if sampling.allowed_token_ids:
            others = np.setdiff1d(np.arange(len(row)), sampling.allowed_token_ids)
            logits[others] = -np.inf
        logits /= sampling.temperature or 1
        return _top_p(_top_k(_min_p(logits, sampling.min_p), sampling.top_k), sampling.top_p)


def _min_p(logits: FloatArray, min_p: float) -> FloatArray:
    if not min_p:
        return logits
    return np.where(logits < logits.max() + np.log(min_p), -np.inf, logits)


def _top_k(logits: FloatArray, top_k: int) -> FloatArray:
    if not 0 < top_k < len(logits):
        return logits
    return np.where(logits < np.sort(logits)[-top_k], -np.inf, logits)


def _top_p(logits: FloatArray, top_p: float) -> FloatArray:
    """Keep the likeliest tokens until their probabilities reach top_p."""
    if top_p >= 1:
        return logits
    order = np.argsort(-logits, kind="stable")
    before = np.cumsum(np.exp(log_softmax(logits))[order]) - np.exp(log_softmax(logits))[order]
    kept = np.full_like(logits, -np.inf)
    chosen = order[before < top_p]
    kept[chosen] = logits[chosen]
    return kept


def log_softmax(row: FloatArray) -> FloatArray:
    """Log-probabilities of a row of logits, [V]."""
    shifted = row - row.max()
    result: FloatArray = shifted - np.log(np.exp(shifted).sum())
    return result
