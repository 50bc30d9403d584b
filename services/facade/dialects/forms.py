"""Describe the answers of all dialects, for OpenAPI and for the page of the API.

Control routes return these models. Answers with samples are written without them, because an answer may have
millions of numbers; `answered` describes those. Tests compare both with what the routes answer.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class AnswerForm(BaseModel):
    """Form of an answer or of a part of it. A field with a default may be absent."""

    model_config = ConfigDict(use_attribute_docstrings=True, protected_namespaces=())


def answered(form: Any, *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return the description of an answer; if it `streams`, a request may ask for events instead.

    `form` is an AnswerForm, or a type made of such.
    """
    found: dict[str, Any] = {"model": form, "description": "The answer"}
    if streams:
        found["description"] = "The answer, or with `stream` its parts as server-sent events"
        found["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: found}


class ErrorDetail(AnswerForm):
    """Description of an error."""

    message: str
    type: str
    """Kind of error, by OpenAI's names, such as `invalid_request_error`."""
    param: str | None
    """Field of the body at fault; null: the whole body, or none."""
    code: str
    """Reason, such as `INVALID_ARGUMENT` or `MODEL_NOT_FOUND`."""


class ErrorForm(AnswerForm):
    """An error in OpenAI's form."""

    error: ErrorDetail
    success: bool | None = None
    """False, on SGLang's control paths."""
    message: str | None = None
    """The error's message, on SGLang's control paths."""


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorForm, "description": "The request is refused"},
    "5XX": {"model": ErrorForm, "description": "The request failed"},
}
"""Description of errors."""


class StatusForm(AnswerForm):
    """State of a probe or of a pause, or that a call is accepted."""

    status: str
    """`ok`, `paused`, `resumed`, or why requests cannot be served."""


class VersionForm(AnswerForm):
    """Version of Paceline."""

    version: str


class SampleName(AnswerForm):
    """Name of a sample, by which its reward is reported."""

    step: int
    prompt_id: str
    slot: int


class VersionRange(AnswerForm):
    """Tokens of a sample that one version of the weights sampled."""

    version: str
    start: int
    """Index of the first token."""
    end: int
    """Index after the last token."""
    mixed_kv: bool | None = None
    """True: they were sampled with KV of earlier versions, too."""


class UsageForm(AnswerForm):
    """Numbers of tokens. Each prompt is counted once, with any number of samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class PromptToken(AnswerForm):
    """A token at a position of the prompt."""

    logprob: float
    rank: int | None
    """1 for the likeliest token; null for the prompt's own token."""
    decoded_token: str


class ChoiceForm(AnswerForm):
    """Common part of the choices of completions and chat, each of which is a sample."""

    index: int
    finish_reason: Literal["stop", "length", "abort"] | None
    stop_reason: str | int | None
    """Stop string or id of the stop token that ended the sample."""
    token_ids: list[int] | None = None
    """Response, with `return_token_ids`."""
    prompt_logprobs: list[dict[str, PromptToken] | None] | None = None
    """With `prompt_logprobs`: at each position of the prompt, tokens by their ids; null for the first."""
    weight_versions: list[VersionRange]
    paceline: SampleName


class CompletionLogprobs(AnswerForm):
    """Log-probabilities, natural logarithms, of the tokens of a completion."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    """The sampled and the likeliest tokens at each position."""
    text_offset: list[int]
    """Always empty."""


class CompletionChoice(ChoiceForm):
    """Sample of a completion."""

    text: str
    """Empty without `model` of the facade."""
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`."""


class AnswerHead(AnswerForm):
    """Common part of the answers of completions and chat."""

    id: str
    object: str
    created: int
    """Seconds since the epoch."""
    model: str
    usage: UsageForm


class CompletionForm(AnswerHead):
    """Answer of /v1/completions, prompt by prompt."""

    choices: list[CompletionChoice]


class TokenLogprob(AnswerForm):
    """A token with its log-probability."""

    token: str
    logprob: float
    bytes: None
    """Always null."""


class SampledLogprob(TokenLogprob):
    """A sampled token, and the likeliest tokens at its position."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(AnswerForm):
    """Log-probabilities of the tokens of a message."""

    content: list[SampledLogprob]


class ChatMessageForm(AnswerForm):
    """Message that the model wrote."""

    role: Literal["assistant"]
    content: str


class ChatChoice(ChoiceForm):
    """Sample that continues a conversation."""

    message: ChatMessageForm
    logprobs: ChatLogprobs | None


class ChatForm(AnswerHead):
    """Answer of /v1/chat/completions."""

    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`."""


class TokenIdLogprob(AnswerForm):
    """A sampled token with its id and log-probability."""

    token: str
    """`token_id:` and the id."""
    token_id: int
    logprob: float
    top_logprobs: list[TokenLogprob]
    """Always empty."""


class TokensLogprobs(AnswerForm):
    """Log-probabilities of sampled tokens."""

    content: list[TokenIdLogprob]


class TokensChoice(AnswerForm):
    """Sample as token ids."""

    index: int
    token_ids: list[int]
    logprobs: TokensLogprobs | None
    finish_reason: Literal["stop", "length", "abort"] | None
    stop_reason: int | str | None
    weight_versions: list[VersionRange]
    paceline: SampleName


class TokensForm(AnswerForm):
    """Answer of /inference/v1/generate."""

    request_id: str
    output_mode: Literal["tokens"]
    choices: list[TokensChoice]
    model: str
    created: int
    """Seconds since the epoch."""
    usage: UsageForm
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`."""


class TokenizeForm(AnswerForm):
    """Answer of /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeForm(AnswerForm):
    """Answer of /detokenize."""

    prompt: str


class ModelCard(AnswerForm):
    """The served model under one of its names."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    """First of the names."""
    max_model_len: int
    """Most tokens of prompt and response together."""


class ModelsForm(AnswerForm):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class WorldSizeForm(AnswerForm):
    """Answer of /get_world_size."""

    world_size: int


class PauseForm(StatusForm):
    """Answer of /pause."""

    aborted_samples: int


class IsPausedForm(AnswerForm):
    """Answer of /is_paused."""

    is_paused: bool


class AbortForm(AnswerForm):
    """Answer of /abort_requests."""

    aborted_samples: int


class UpdateForm(StatusForm):
    """Answer of /update_weights."""

    message: str
    weight_version: int
    """Published version."""


class TrlForm(AnswerForm):
    """Answer of /generate/, prompt by prompt."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[list[float]]] | None
    """By sample, position and likeliest token; null if they were not requested."""
    logprob_token_ids: list[list[list[int]]] | None
    """Tokens of `logprobs`."""


class SglangFinish(AnswerForm):
    """End of a sample."""

    type: Literal["stop", "length", "abort"]
    matched: str | int | None = None
    """Stop string or token, of `stop`."""
    length: int | None = None
    """Tokens of the response, of `length`."""
    message: str | None = None
    """Text of `abort`."""


Likely = tuple[float | None, int, str | None]
"""Log-probability, token id, and its text with `return_text_in_logprobs`."""


class SglangMeta(AnswerForm):
    """Facts about a sample."""

    id: str
    finish_reason: SglangFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Always 0."""
    weight_version: str | None
    """Version of the last token's weights."""
    weight_versions: list[VersionRange]
    paceline: SampleName
    spec_accept_token_num: int
    """Accepted draft tokens."""
    spec_draft_token_num: int
    """Draft tokens."""
    spec_verify_ct: int
    """Steps that verified drafts."""
    output_token_logprobs: list[Likely] | None = None
    """With `return_logprob`: log-probability, token id and text of each token."""
    output_top_logprobs: list[list[Likely]] | None = None
    """With `top_logprobs_num`: the likeliest tokens at each position."""
    input_token_logprobs: list[Likely] | None = None
    """With `logprob_start_len`: the same for the prompt; null for its first token."""
    input_top_logprobs: list[list[Likely] | None] | None = None
    """With `logprob_start_len` and `top_logprobs_num`."""


class SglangForm(AnswerForm):
    """Answer of /generate to one prompt with one sample; several are a list."""

    text: str
    """Empty without `model` of the facade."""
    output_ids: list[int]
    meta_info: SglangMeta


class SglangAbortForm(AbortForm):
    """Answer of /abort_request."""

    success: bool


class SglangControlForm(AnswerForm):
    """Answer of SGLang's control paths."""

    success: bool
    message: str


class SglangUpdateForm(SglangControlForm):
    """Answer of /update_weights_from_disk."""

    weight_version: str
    """Published version."""
    num_paused_requests: int


class WeightVersionForm(AnswerForm):
    """Answer of /get_weight_version."""

    weight_version: str


class SglangServerForm(WeightVersionForm):
    """Answer of /get_server_info."""

    model_path: str
    served_model_name: str
    tp_size: int
    pp_size: int
    dp_size: int
    enable_memory_saver: bool
    context_length: int
    """Most tokens of prompt and response together."""
    version: str


class SglangModelForm(WeightVersionForm):
    """Answer of /get_model_info."""

    model_path: str
    tokenizer_path: str
    is_generation: bool


class LoadForm(AnswerForm):
    """Samples of this facade."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    """Samples that wait for the end of a pause."""


class LoadsForm(AnswerForm):
    """Answer of /v1/loads."""

    loads: list[LoadForm]


class HintForm(AnswerForm):
    """Answer of /paceline/v1/hint."""

    samples: int
    """Samples that may be drafted; 0 if the hint cannot be used."""


class RewardsForm(AnswerForm):
    """Answer of /paceline/v1/rewards."""

    matched: int
    """Rewards whose samples are known."""
