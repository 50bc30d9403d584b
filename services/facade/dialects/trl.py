"""Read and answer requests to the server of `trl vllm-serve`, which TRL used before vLLM's own. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from paceline import types as t
from paceline.errors import Violation
from services.contracts.errors import InvalidArgument
from services.facade.dialects.body import (
    Body,
    Limits,
    Part,
    RequestedSamples,
    SamplesBody,
    TokenId,
    VllmSeed,
    as_it_is,
    check_unsupported,
    checked_count,
    checked_likeliest,
    finite,
    requested_samples,
    run_seed,
    stops_of,
    token_ids_of,
    top_k_of,
)
from services.facade.http_errors import field_of
from services.facade.samples import SampleOutput
from services.facade.text import Tokenizer

NEUTRAL: dict[str, Sequence[Any]] = {
    "guided_decoding_regex": ("",),
    "images": ([],),
    "structured_outputs_regex": ("",),
    "truncate_prompt_tokens": (),
}
"""Unsupported parameters, with their neutral values."""

_KEYWORDS = ("frequency_penalty", "ignore_eos", "min_tokens", "presence_penalty", "stop", "stop_token_ids")
NAMES = {
    "prompt": "prompts",
    "top_logprobs": "logprobs",
    **{name: f"generation_kwargs.{name}" for name in _KEYWORDS},
}
"""Names of the parameters in a body, where they differ from the SDK's."""
_SEED = "generation_kwargs.seed"


class TrlSampling(Body):
    """Supported keys of `generation_kwargs`."""

    seed: VllmSeed = None
    stop_token_ids: list[TokenId] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class TrlBody(SamplesBody):
    """Body of /generate/, with TRL's names and defaults."""

    prompts: list[str] | list[list[TokenId]]
    """Texts, or token ids."""
    n: int = 1
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 16
    logprobs: int | None = 0
    """0: log-probabilities of the sampled tokens. N: of the N likeliest tokens at each position, and of the
    sampled one if it is not among them. null: none."""
    generation_kwargs: dict[str, Any] | None = None
    """Supported keys: `seed`, `stop`, `stop_token_ids`, `ignore_eos`, `min_tokens` and the penalties."""

    def names_in_body(self) -> Mapping[str, str]:
        """Return the names of parameters in this body."""
        return NAMES

    def samples(self, tokenizer: Tokenizer | None, limits: Limits) -> RequestedSamples:
        """Return the requested samples."""
        check_unsupported(self, NEUTRAL)
        more = trl_sampling(self)
        seed, field = run_seed(more.seed, _SEED), _SEED
        prompts, each = prompts_of(self, tokenizer, limits), checked_count(self.n)
        return requested_samples(prompts, each, sampling_of(self, more), seed, limits, NAMES, field)

    def drop_prompts(self) -> None:
        """Drop the prompts."""
        self.prompts, self.generation_kwargs = [], None


def prompts_of(body: TrlBody, tokenizer: Tokenizer | None, limits: Limits | None = None) -> list[list[int]]:
    """Return the token ids of the prompts. InvalidArgument: they are text, and there is no tokenizer."""
    return token_ids_of(body.prompts, "prompts", tokenizer, limits)


def trl_sampling(body: TrlBody) -> TrlSampling:
    """Return the supported keys of `generation_kwargs`. InvalidArgument for others."""
    try:
        more = TrlSampling(**(body.generation_kwargs or {}))
    except ValidationError as error:
        found = [Violation(f"generation_kwargs.{field_of(e['loc'])}", e["msg"]) for e in error.errors()]
        raise InvalidArgument(found) from error
    check_unsupported(more, {}, "generation_kwargs.", body)
    return more


def sampling_of(body: TrlBody, more: TrlSampling) -> t.SamplingParams:
    """Return the sampling parameters; log-probabilities are processed, as in TRL's server."""
    return t.SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=top_k_of(body.top_k),
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=more.presence_penalty,
        frequency_penalty=more.frequency_penalty,
        max_tokens=body.max_tokens,
        min_tokens=more.min_tokens,
        stop_token_ids=tuple(more.stop_token_ids or ()),
        stop=stops_of(more.stop),
        ignore_eos=more.ignore_eos,
        top_logprobs=checked_likeliest(body.logprobs or 0, "logprobs"),
        logprobs_mode=t.LogprobsMode.PROCESSED,
    )


def answer(
    body: TrlBody, _tokenizer: Tokenizer | None, outputs: Sequence[SampleOutput], part: Part = as_it_is
) -> dict[str, Any]:
    """Return the answer: prompts once, samples prompt by prompt, log-probabilities as a list at each position."""
    logprobs, tokens = [], []
    for output in outputs if body.logprobs is not None else ():
        found = _logprobs_of(output)
        logprobs.append(part([finite(values) for _, values in found]))
        tokens.append(part([ids for ids, _ in found]))
    return {
        "prompt_ids": [part(output.prompt) for output in outputs[:: body.n]],
        "completion_ids": [output.token_ids for output in outputs],
        "logprobs": None if body.logprobs is None else logprobs,
        "logprob_token_ids": None if body.logprobs is None else tokens,
    }


def _logprobs_of(output: SampleOutput) -> list[tuple[list[int], list[float]]]:
    """Return the tokens to report at each position with their log-probabilities, the likeliest first."""
    found = []
    for token, logprob, (tokens, values) in zip(
        output.token_ids, output.logprobs, output.columns.top_rows(), strict=True
    ):
        if not tokens:
            tokens, values = [token], [logprob]
        else:
            if token not in tokens:
                # The sampled token is less likely than all of these.
                tokens, values = [*tokens, token], [*values, logprob]
        found.append((tokens, values))
    return found
