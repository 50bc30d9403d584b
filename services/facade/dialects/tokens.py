"""Read and answer requests to `/inference/v1/generate`, `/tokenize` and `/detokenize` of vLLM. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from pydantic import Field, PrivateAttr

from paceline import types as t
from paceline.errors import Violation
from services.contracts.errors import InvalidArgument
from services.facade.dialects.answers import usage
from services.facade.dialects.body import (
    FINISH_REASONS,
    Body,
    Limits,
    Part,
    RequestedSamples,
    SamplesBody,
    TokenId,
    as_it_is,
    check_token_ids,
    check_unsupported,
    checked_count,
    finite,
    identity_of,
    requested_samples,
    run_seed,
    token_ids_of,
    weight_versions,
)
from services.facade.dialects.vllm import SamplingFields, StreamOptions, check_stream_options, sampling_of
from services.facade.samples import SampleOutput
from services.facade.text import Tokenizer, needs_text

Json = dict[str, Any]

NEUTRAL: dict[str, Sequence[Any]] = {
    "content_parts": ([],),
    "ec_transfer_params": (),
    "features": (),
    "kv_transfer_params": (),
    "output_mode": ("tokens",),
    "priority": (0,),
    "reasoning_ended": (True, False),
    "reasoning_parser_kwargs": (),
    "token_offsets": (),
}
"""Unsupported parameters of vLLM, with their neutral values."""
NEUTRAL_SAMPLING: dict[str, Sequence[Any]] = {
    "bad_words": ([],),
    "detokenize": (True, False),
    "extra_args": ({},),
    "flat_logprobs": (False,),
    "logit_bias": ({},),
    "logprob_token_ids": ([],),
    "output_kind": (0, 1, 2),
    "output_text_buffer_length": (0,),
    "prompt_logprob_start": (0,),
    "prompt_logprob_token_ids": (),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "routed_experts_prompt_start": (0,),
    "skip_reading_prefix_cache": (True, False),
    "skip_clone": (True, False),
    "spaces_between_special_tokens": (True, False),
    "stream_interval": (1,),
    "structured_outputs": (),
    "thinking_token_budget": (-1,),
    "trace_decode_token_ids": (),
    "truncate_prompt_tokens": (),
    "watermarking": (False,),
}
"""Unsupported sampling parameters likewise. Parameters of text have no effect on an answer without text."""
_SAMPLING = (
    *("allowed_token_ids", "frequency_penalty", "ignore_eos", "max_tokens", "min_p", "min_tokens", "n"),
    *("presence_penalty", "repetition_penalty", "stop", "stop_token_ids", "temperature", "top_k", "top_p"),
)
NAMES = {"prompt": "token_ids", **{name: f"sampling_params.{name}" for name in _SAMPLING}}
"""Names of the parameters in a body."""


class TokensSampling(SamplingFields):
    """Sampling parameters of vLLM."""

    max_tokens: int | None = None
    """Left out: up to the model's length, as in vLLM's server."""
    logprobs: int | None = None
    """0 or 1: log-probabilities of the sampled tokens; other tokens are not supported."""


class TokensBody(SamplesBody):
    """Body of /inference/v1/generate."""

    token_ids: list[TokenId] = Field(min_length=1)
    """Prompt."""
    sampling_params: TokensSampling
    model: str | None = None
    """Name of the model; must be the one that is served."""
    request_id: str | None = None
    """Name of the request, for /abort_requests."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """True: the answer has `prompt_token_ids`."""
    cache_salt: str | None = None
    """Has no effect: KV of other versions of the weights is never reused."""

    def names_in_body(self) -> Mapping[str, str]:
        """Return the names of parameters in this body."""
        return NAMES

    def samples(self, tokenizer: Tokenizer | None, limits: Limits) -> RequestedSamples:
        """Return the requested samples."""
        given = self.sampling_params
        check_unsupported(self, NEUTRAL)
        check_unsupported(given, NEUTRAL_SAMPLING, "sampling_params.", self)
        check_stream_options(self.stream_options, self)
        limits.check_model(self.model)
        checked_logprobs(given.logprobs)
        each = checked_count(given.n, "sampling_params.n")
        sampling = sampling_of(given, given.max_tokens, limits.logprobs_mode)
        seed, field = run_seed(given.seed, "sampling_params.seed"), "sampling_params.seed"
        return requested_samples([self.token_ids], each, sampling, seed, limits, NAMES, field)

    def drop_prompts(self) -> None:
        """Drop the prompt."""
        self.token_ids = []
        self.sampling_params.__pydantic_extra__ = {}


class AnsweredBody(Body):
    """Body of a request without samples. Once prepared, it has the answer."""

    of_model = True
    _answer: bytes = PrivateAttr(b"")

    @property
    def answer(self) -> bytes:
        """Answer to the prepared body."""
        return self._answer


class TokenizeBody(AnsweredBody):
    """Body of /tokenize."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True

    def prepare(self, tokenizer: Tokenizer | None, limits: Limits | None) -> None:
        """Write the answer."""
        assert limits is not None, "it is about a model"
        check_unsupported(self, {"return_token_strs": (False,)})
        limits.check_model(self.model)
        (found,) = token_ids_of([self.prompt], "prompt", tokenizer, limits, special=self.add_special_tokens)
        answer = {"tokens": found, "count": len(found), "max_model_len": limits.max_model_len}
        self._answer, self.prompt = msgspec.json.encode(answer), ""


class DetokenizeBody(AnsweredBody):
    """Body of /detokenize."""

    tokens: list[TokenId]
    model: str | None = None

    def prepare(self, tokenizer: Tokenizer | None, limits: Limits | None) -> None:
        """Write the answer."""
        assert limits is not None, "it is about a model"
        check_unsupported(self, {})
        limits.check_model(self.model)
        check_token_ids(self.tokens, limits.vocab_size, "tokens")
        text = needs_text(tokenizer, "tokens").decode(self.tokens, skip_special=False)
        self._answer, self.tokens = msgspec.json.encode({"prompt": text}), []


def checked_logprobs(logprobs: int | None) -> bool:
    """Return True if log-probabilities are requested; InvalidArgument if they include other tokens."""
    if logprobs not in (None, 0, 1):
        found = f"{logprobs} is not supported; 0 and 1 give those of the sampled tokens"
        raise InvalidArgument([Violation("sampling_params.logprobs", found)])
    return logprobs is not None


class TokensWriter:
    """Writes the answer to one request for tokens, whole or as events with the new tokens."""

    def __init__(
        self, body: TokensBody, request_id: str, head: tuple[int, str], _tokenizer: Tokenizer | None = None
    ) -> None:
        """`head` is the time (seconds since the epoch) and the name of the model. The answer has no text."""
        self._body = body
        self._request_id = request_id
        self._created, self._model = head
        self._logprobs = checked_logprobs(body.sampling_params.logprobs)
        self._sent: dict[int, int] = {}

    def whole(self, outputs: Sequence[SampleOutput], part: Part = as_it_is) -> Json:
        """Return the answer with all samples, each written by `part`."""
        choices = [part(self._choice(index, output, 0)) for index, output in enumerate(outputs)]
        answer = self._object(choices)
        answer |= {"model": self._model, "created": self._created, "usage": self._usage(outputs)}
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = outputs[0].prompt
        return answer

    def events(self, changed: Sequence[tuple[int, SampleOutput]]) -> list[Json]:
        """Return the events of changed samples, given with their places: their tokens since the last call."""
        found = []
        for index, output in changed:
            event = self._object([self._choice(index, output, self._sent.get(index, 0))])
            if self._body.return_token_ids and index not in self._sent:
                event["prompt_token_ids"] = output.prompt
            self._sent[index] = len(output.token_ids)
            found.append(event)
        return found

    def last_events(self, outputs: Sequence[SampleOutput]) -> list[Json]:
        """Return the events that follow the samples: the numbers of tokens, if they were requested."""
        options = self._body.stream_options
        if options is None or not options.include_usage:
            return []
        return [{**self._object([]), "usage": self._usage(outputs)}]

    def _usage(self, outputs: Sequence[SampleOutput]) -> Json:
        return usage(outputs, len(outputs))

    def _object(self, choices: list[Json]) -> Json:
        return {"request_id": self._request_id, "output_mode": "tokens", "choices": choices}

    def _choice(self, index: int, output: SampleOutput, begin: int) -> Json:
        reason = output.finish_reason
        last = output.token_ids[-1] if output.token_ids else None
        stops = self._body.sampling_params.stop_token_ids or ()
        choice: Json = {
            "index": index,
            "token_ids": output.token_ids[begin:].tolist(),
            "logprobs": self._logprobs_from(output, begin) if self._logprobs else None,
            "finish_reason": None if reason is None else FINISH_REASONS[reason],
            "stop_reason": output.stop_string
            or (last if reason is t.FinishReason.STOP and last in stops else None),
        }
        if reason is not None:
            choice["weight_versions"] = weight_versions(output.version_spans)
            choice["paceline"] = identity_of(output.request)
        return choice

    def _logprobs_from(self, output: SampleOutput, begin: int) -> Json:
        # Clients of vLLM before 0.31 read `token`, later ones `token_id`.
        pairs = zip(output.token_ids[begin:], finite(output.logprobs[begin:].tolist()), strict=True)
        content = [
            {"token": f"token_id:{token}", "token_id": token, "logprob": value, "top_logprobs": []}
            for token, value in pairs
        ]
        return {"content": content}
