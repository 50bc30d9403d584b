"""Read the bodies of vLLM's server and of OpenAI's completions; chat has its own module.

They have OpenAI's parameters and vLLM's additions. The sampling defaults of a model come from its
`generation_config.json`. Pure except for the reading of that file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from paceline import types as t
from paceline.errors import Violation
from paceline.files import read_object
from services.contracts.errors import InvalidArgument
from services.facade.dialects.body import (
    Body,
    Limits,
    RequestedSamples,
    SamplesBody,
    TokenId,
    VllmSeed,
    check_unsupported,
    checked_count,
    checked_likeliest,
    requested_samples,
    run_seed,
    stops_of,
    token_ids_of,
    top_k_of,
)
from services.facade.dialects.forms import ModelCard, ModelsForm
from services.facade.text import Tokenizer

Json = dict[str, Any]

NEUTRAL: dict[str, Sequence[Any]] = {
    "bad_words": ([],),
    "best_of": (1,),
    "detokenize": (True,),
    "documents": (),
    "echo": (False,),
    "ec_transfer_params": (),
    "guided_decoding": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logit_bias": ({},),
    "logprob_token_ids": ([],),
    "media_io_kwargs": (),
    "mm_payload": ("tensors", "none"),
    "mm_processor_kwargs": (),
    "no_stop_trim": (False,),
    "parallel_tool_calls": (True, False),
    "priority": (0,),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "repetition_detection": (),
    "return_hidden_states": (False,),
    "return_mm_kwargs": (True, False),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "separate_reasoning": (True, False),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "stream_reasoning": (True, False),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "tool_choice": ("none",),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "truncation_side": ("left", "right"),
    "use_beam_search": (False,),
    "vllm_xargs": (),
    "watermarking": (False,),
}
"""Unsupported parameters of vLLM and of SGLang's router, with their neutral values."""


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = False
    """True: a last event has the numbers of tokens."""


def check_stream_options(options: StreamOptions | None, body: Body) -> None:
    """Refuse options of a streamed answer that are not supported."""
    if options is not None:
        check_unsupported(options, {"continuous_usage_stats": (False,)}, "stream_options.", body)


class SamplingFields(Body):
    """Sampling parameters, under vLLM's names and with vLLM's defaults."""

    n: int = 1
    """Samples of each prompt."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 and -1 are off."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[TokenId] | None = None
    stop: str | list[str] | None = None
    """Strings that end a sample; they are cut off its text, unless `include_stop_str_in_output`."""
    include_stop_str_in_output: bool = False
    allowed_token_ids: list[TokenId] | None = Field(default=None, min_length=1)
    """Only these tokens are sampled."""
    ignore_eos: bool = False
    seed: VllmSeed = None
    """With the same seed, the same request has the same samples. Left out or -1: one is drawn."""
    skip_special_tokens: bool = True
    """True: the text has no special tokens. The token ids have them."""

    def fill_in(self, defaults: Mapping[str, float]) -> None:
        """Set parameters that the body leaves out."""
        for name, value in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)


class SamplingBody(SamplingFields, SamplesBody):
    """Common part of the bodies of completions and of chat."""

    model: str | None = None
    """Name of the model; must be the one that is served."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: Json | None = None
    """`{"type": "json_schema", "json_schema": {"schema": ...}}`, or `{"type": "text"}`."""
    structured_outputs: Json | None = None
    """`{"json": ...}`, a JSON schema as an object or as text. Other keys of vLLM are not supported."""
    prompt_logprobs: int | None = None
    """Log-probabilities of the prompt's tokens, and of this many likeliest tokens at each position, at most 20."""
    return_token_ids: bool = False
    """True: the answer has `token_ids` and `prompt_token_ids`."""
    return_tokens_as_token_ids: bool = False
    """True: tokens of log-probabilities are written as `token_id:17`."""
    user: str | None = None
    """Has no effect."""
    session_id: str | None = None
    """Has no effect."""
    cache_salt: str | None = None
    """Has no effect: KV of other versions of the weights is never reused."""
    request_id: str | None = None
    """Name of the request, for /abort_requests."""

    def samples(self, tokenizer: Tokenizer | None, limits: Limits) -> RequestedSamples:
        """Return the requested samples."""
        check_unsupported(self, NEUTRAL)
        check_stream_options(self.stream_options, self)
        limits.check_model(self.model)
        self.fill_in(limits.defaults)
        sampling = sampling_of(self, self.most_tokens(), limits.logprobs_mode)
        each, seed = checked_count(self.n), run_seed(self.seed)
        prompts = self.prompts(tokenizer, limits)
        return requested_samples(prompts, each, sampling, seed, limits, self.names_in_body())

    def prompts(self, tokenizer: Tokenizer | None, limits: Limits) -> list[list[int]]:
        """Return the token ids of the prompts."""
        raise NotImplementedError

    def most_tokens(self) -> int | None:
        """Return the most response tokens; None: up to the model's length."""
        raise NotImplementedError

    def likeliest(self) -> int:
        """Return the requested number of likeliest tokens at each position."""
        raise NotImplementedError

    def has_logprobs(self) -> bool:
        """Return True if the answer has the log-probabilities of the sampled tokens."""
        raise NotImplementedError


def names_of(body: SamplingBody, names: Mapping[str, str]) -> dict[str, str]:
    """Return the names of a body's parameters, where they differ from the SDK's; `names` has more of them."""
    schema = "structured_outputs" if body.structured_outputs is not None else "response_format"
    longest = (
        "max_tokens" if getattr(body, "max_completion_tokens", None) is None else "max_completion_tokens"
    )
    return {"json_schema": schema, "max_tokens": longest, **names}


def schema_of(body: SamplingBody) -> str:
    """Return the JSON schema of a body as text; InvalidArgument for other formats, and for two schemas."""
    found = []
    if (given := body.response_format) is not None and given != {"type": "text"}:
        schema = (
            (given.get("json_schema") or {}).get("schema") if given.get("type") == "json_schema" else None
        )
        found.append(_schema_text(schema, "response_format", "{'type': 'json_schema', 'json_schema': ...}"))
    if (outputs := body.structured_outputs) is not None:
        given_keys = {key for key, value in outputs.items() if value is not None}
        schema = outputs.get("json") if given_keys == {"json"} else None
        found.append(_schema_text(schema, "structured_outputs", "{'json': ...}"))
    if len(found) > 1:
        raise InvalidArgument([Violation("structured_outputs", "is set beside response_format")])
    return found[0] if found else ""


def _schema_text(schema: Any, field: str, allowed: str) -> str:
    if not isinstance(schema, dict | str):
        raise InvalidArgument([Violation(field, f"is not supported; must be {allowed}")])
    return schema if isinstance(schema, str) else json.dumps(schema)


def sampling_of(
    body: SamplingFields, max_tokens: int | None, logprobs_mode: t.LogprobsMode
) -> t.SamplingParams:
    """Return the sampling parameters of a body."""
    sampling = t.SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=top_k_of(body.top_k),
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        stop=stops_of(body.stop),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        ignore_eos=body.ignore_eos,
        logprobs_mode=logprobs_mode,
    )
    if not isinstance(body, SamplingBody):
        return sampling
    return replace(
        sampling,
        json_schema=schema_of(body),
        top_logprobs=body.likeliest(),
        prompt_logprobs=checked_likeliest(body.prompt_logprobs, "prompt_logprobs"),
    )


class UpdateBody(Body):
    """Body of /update_weights, as prime-rl sends it."""

    weight_dir: str
    """Folder of the weights, as the instances see it."""

    def prepare(self, tokenizer: Tokenizer | None, limits: Limits | None) -> None:
        """Check the parameters that have no field."""
        check_unsupported(self, {"reset_prefix_cache": (True, False)})


class AbortRequestsBody(Body):
    """Body of /abort_requests."""

    request_ids: list[str] = Field(max_length=65536)
    """Names of requests, `request_id` in their bodies."""


def models(names: Sequence[str], max_model_len: int) -> ModelsForm:
    """Return the list of models: the served one, under each of its names."""
    cards = [
        ModelCard(
            id=name,
            object="model",
            created=0,
            owned_by="paceline",
            root=names[0],
            max_model_len=max_model_len,
        )
        for name in names
    ]
    return ModelsForm(object="list", data=cards)


COMPLETION_NAMES = {"top_logprobs": "logprobs"}
"""Names of the parameters in a body, where they differ from the SDK's."""


class CompletionBody(SamplingBody):
    """Body of /v1/completions."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    """Text or token ids, of one prompt or of several."""
    max_tokens: int = 16
    logprobs: int | None = None
    """Log-probabilities of the sampled tokens, and of this many likeliest tokens at each position, at most 20."""
    add_special_tokens: bool = True
    """True: text gets the special tokens that the model expects, such as a beginning token."""

    def names_in_body(self) -> Mapping[str, str]:
        """Return the names of parameters in this body."""
        return names_of(self, COMPLETION_NAMES)

    def prompts(self, tokenizer: Tokenizer | None, limits: Limits) -> list[list[int]]:
        """Return the token ids of the prompts."""
        return completion_prompts(self, tokenizer, limits)

    def drop_prompts(self) -> None:
        """Drop the prompts."""
        self.prompt = ""

    def most_tokens(self) -> int | None:
        """Return the most response tokens."""
        return self.max_tokens

    def likeliest(self) -> int:
        """Return the requested number of likeliest tokens at each position."""
        return checked_likeliest(self.logprobs or 0, "logprobs")

    def has_logprobs(self) -> bool:
        """Return True if the answer has the log-probabilities of the sampled tokens."""
        return self.logprobs is not None


def completion_prompts(
    body: CompletionBody, tokenizer: Tokenizer | None, limits: Limits | None = None
) -> list[list[int]]:
    """Return the token ids of a body's prompts. InvalidArgument: it has none, or text has no tokenizer."""
    given = body.prompt
    several = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not several:
        raise InvalidArgument([Violation("prompt", "is empty")])
    return token_ids_of(several, "prompt", tokenizer, limits, special=body.add_special_tokens)


GENERATION_CONFIG = "generation_config.json"
RECOMMENDED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Parameters that vLLM's server takes from the file."""


def model_defaults(folder: Path) -> dict[str, float]:
    """Return the sampling parameters in a model's folder, by vLLM's names; none if it has no such file.

    `do_sample` has no effect, as in vLLM. Neither has `max_new_tokens`, which bounds the response in vLLM.

    ValueError: the file has no JSON object, or a parameter is not a number. OSError: it cannot be read.
    """
    try:
        found = read_object(folder / GENERATION_CONFIG)
    except FileNotFoundError:
        return {}
    named = {name: found[name] for name in RECOMMENDED if found.get(name) is not None}
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
            raise ValueError(f"{name} is {value!r}; must be a number")
    return named
