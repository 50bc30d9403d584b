"""Bodies of vLLM's server, which are those of OpenAI's API and what vLLM adds to them. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from paceline import types as t
from paceline.errors import Violation
from services.contracts.errors import InvalidArgument
from services.facade.dialects.parameters import (
    FINISH_REASONS,
    Body,
    checked_likeliest,
    finite,
    stops_of,
    top_k_of,
    weight_versions,
)
from services.facade.samples import SampleOutput
from services.facade.text import TextStream, Tokenizer, longest_beginning, needs_text, text_of

Json = dict[str, Any]

NEUTRAL: dict[str, Sequence[Any]] = {
    "bad_words": ([],),
    "best_of": (1,),
    "detokenize": (True,),
    "echo": (False,),
    "guided_decoding": (),
    "length_penalty": (1.0,),
    "logit_bias": ({},),
    "no_stop_trim": (False,),
    "priority": (0,),
    "return_hidden_states": (False,),
    "separate_reasoning": (True, False),
    "spaces_between_special_tokens": (True,),
    "stream_reasoning": (True, False),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Parameters of vLLM and of SGLang's router that are not supported, with the values that ask for nothing."""


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = False
    """Whether a last event has the numbers of tokens."""


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
    stop_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    """Strings that end a sample; its text is without them, unless `include_stop_str_in_output`."""
    include_stop_str_in_output: bool = False
    allowed_token_ids: list[int] | None = None
    """Nothing else is sampled."""
    ignore_eos: bool = False
    seed: int | None = None
    """With the same seed, the same request has the same samples. Left out: one is drawn."""
    skip_special_tokens: bool = True
    """Whether the text is without special tokens; the token ids have them."""


class SamplingBody(SamplingFields):
    """Common part of the bodies of completions and of chat."""

    model: str | None = None
    """Name of the model; must be the one that is served."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: Json | None = None
    """`{"type": "json_schema", "json_schema": {"schema": ...}}`, or `{"type": "text"}`."""
    structured_outputs: Json | None = None
    """`{"json": ...}`, a JSON schema as an object or as text. Nothing else of vLLM's is supported."""
    prompt_logprobs: int | None = None
    """Log-probabilities of the prompt's tokens, and of so many of the likeliest of each position; at most 20."""
    return_token_ids: bool = False
    """Whether the answer has `token_ids` and `prompt_token_ids`."""
    return_tokens_as_token_ids: bool = False
    """Whether tokens of log-probabilities are written as `token_id:17`."""
    user: str | None = None
    """Has no effect."""
    cache_salt: str | None = None
    """Has no effect: prompts of other versions of the weights are never reused."""
    request_id: str | None = None
    """Name of the request, for /abort_requests."""


class CompletionBody(SamplingBody):
    """Body of /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    """Text or token ids, of one prompt or of several."""
    max_tokens: int | None = 16
    logprobs: int | None = None
    """Log-probabilities of the sampled tokens, and of so many of the likeliest of each position; at most 20."""
    add_special_tokens: bool = True
    """Whether text gets the special tokens that the model expects, such as one of its beginning."""


class ChatBody(SamplingBody):
    """Body of /v1/chat/completions."""

    messages: list[Json] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """Newer name of `max_tokens`. Neither: what the model's length leaves."""
    logprobs: bool | None = None
    """Whether the answer has the log-probabilities of the sampled tokens."""
    top_logprobs: int | None = None
    """With `logprobs`: so many of the likeliest tokens of each position, at most 20."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    """Template in place of the model's."""
    chat_template_kwargs: Json | None = None


def schema_of(body: SamplingBody) -> str:
    """Return the JSON schema of a body as text; InvalidArgument for other formats, and for two schemas."""
    found = []
    if (given := body.response_format) is not None and given != {"type": "text"}:
        schema = (
            (given.get("json_schema") or {}).get("schema") if given.get("type") == "json_schema" else None
        )
        found.append(_schema_text(schema, "response_format", "{'type': 'json_schema', 'json_schema': ...}"))
    if (outputs := body.structured_outputs) is not None:
        schema = outputs.get("json") if set(outputs) == {"json"} else None
        found.append(_schema_text(schema, "structured_outputs", "{'json': ...}"))
    if len(found) > 1:
        raise InvalidArgument([Violation("structured_outputs", "is set beside response_format")])
    return found[0] if found else ""


def _schema_text(schema: Any, field: str, allowed: str) -> str:
    if not isinstance(schema, dict | str):
        raise InvalidArgument([Violation(field, f"is not supported; must be {allowed}")])
    return schema if isinstance(schema, str) else json.dumps(schema)


def likeliest_of(body: CompletionBody | ChatBody) -> int:
    """Return how many of the likeliest tokens of each position a body asks for.

    InvalidArgument: they are asked for without `logprobs`.
    """
    if isinstance(body, CompletionBody):
        return checked_likeliest(body.logprobs or 0, "logprobs")
    if body.top_logprobs and not body.logprobs:
        raise InvalidArgument([Violation("top_logprobs", "is set, which needs logprobs")])
    return checked_likeliest(body.top_logprobs or 0, "top_logprobs")


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
    if not isinstance(body, CompletionBody | ChatBody):
        return sampling
    return replace(
        sampling,
        json_schema=schema_of(body),
        top_logprobs=likeliest_of(body),
        prompt_logprobs=checked_likeliest(body.prompt_logprobs, "prompt_logprobs"),
    )


def completion_prompts(body: CompletionBody, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Return the token ids of a body's prompts. InvalidArgument: there is none, or text and no tokenizer."""
    given = body.prompt
    several = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not several:
        raise InvalidArgument([Violation("prompt", "is empty")])
    return [
        needs_text(tokenizer, "prompt").encode(each, body.add_special_tokens)
        if isinstance(each, str)
        else list(each)  # type: ignore[arg-type]
        for each in several
    ]


def chat_prompt(body: ChatBody, tokenizer: Tokenizer | None) -> list[int]:
    """Return the token ids of a conversation. InvalidArgument: there is no tokenizer, or its template refuses."""
    options = {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        **(body.chat_template_kwargs or {}),
    }
    return needs_text(tokenizer, "messages").chat(body.messages, options, body.chat_template)


class AnswerWriter:
    """Writes the answer to one request, whole or as events."""

    def __init__(
        self,
        body: SamplingBody,
        kind: Literal["completion", "chat"],
        head: tuple[str, int, str],
        tokenizer: Tokenizer | None,
    ) -> None:
        """`head` is the answer's id, its time (seconds since the epoch) and the name of the model."""
        self._body = body
        self._chat = kind == "chat"
        self._head = head
        self._tokenizer = tokenizer
        self._sent: dict[int, int] = {}
        self._texts: dict[int, TextStream] = {}
        self._ended: set[int] = set()
        trims = not body.include_stop_str_in_output
        self._held = longest_beginning(stops_of(body.stop)) if trims else 0
        logprobs: bool | int | None = getattr(body, "logprobs", None)
        self._logprobs = bool(logprobs) if self._chat else logprobs is not None

    def whole(self, outputs: Sequence[SampleOutput]) -> Json:
        """Return the answer with all samples."""
        answer = self._object("" if not self._chat else "chat.completion")
        answer["choices"] = [self._choice(index, output) for index, output in enumerate(outputs)]
        answer["usage"] = usage(outputs, self._body.n)
        if self._chat and self._body.return_token_ids:
            answer["prompt_token_ids"] = list(outputs[0].request.prompt_token_ids)
        return answer

    def events(self, changed: Sequence[tuple[int, SampleOutput]]) -> list[Json]:
        """Return the events for what is new since the last call in samples that come with their places."""
        return [event for index, output in changed if (event := self._event(index, output))]

    def last_events(self, outputs: Sequence[SampleOutput]) -> list[Json]:
        """Return what follows the samples: their numbers of tokens, if they were asked for."""
        options = self._body.stream_options
        if options is None or not options.include_usage:
            return []
        return [
            {**self._object("chat.completion.chunk"), "choices": [], "usage": usage(outputs, self._body.n)}
        ]

    def _object(self, chat_kind: str) -> Json:
        name, created, model = self._head
        kind = chat_kind if self._chat else "text_completion"
        return {"id": name, "object": kind, "created": created, "model": model}

    def _choice(self, index: int, output: SampleOutput) -> Json:
        text = ""
        if self._tokenizer is not None:
            skip_special, trimmed = self._body.skip_special_tokens, self._trimmed(output)
            text = text_of(self._tokenizer, output.token_ids, skip_special, trimmed)
        choice: Json = {"index": index}
        choice |= {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice |= self._tail(output, 0)
        if self._body.return_token_ids and not self._chat:
            choice["prompt_token_ids"] = list(output.request.prompt_token_ids)
        return choice

    def _event(self, index: int, output: SampleOutput) -> Json | None:
        sent, ended = self._sent.get(index), output.finish_reason is not None
        if index in self._ended or (not ended and len(output.token_ids) <= (sent or 0)):
            return None
        if (stream := self._texts.get(index)) is None:
            stream = TextStream(self._tokenizer, self._body.skip_special_tokens, self._held)
            self._texts[index] = stream
        text = stream.grow(output.token_ids, ended, self._trimmed(output))
        choice: Json = {"index": index}
        if self._chat:
            choice["delta"] = (
                {"content": text} if sent is not None else {"role": "assistant", "content": text}
            )
        else:
            choice["text"] = text
        choice |= self._tail(output, sent or 0)
        event = {**self._object("chat.completion.chunk"), "choices": [choice]}
        if self._body.return_token_ids and sent is None:
            (event if self._chat else choice)["prompt_token_ids"] = list(output.request.prompt_token_ids)
        self._sent[index] = len(output.token_ids)
        if ended:
            self._ended.add(index)
        return event

    def _trimmed(self, output: SampleOutput) -> str:
        """Return the stop string that the text of a sample is without."""
        return "" if self._body.include_stop_str_in_output else output.stop_string

    def _tail(self, output: SampleOutput, begin: int) -> Json:
        """Return what a choice has beside its text, of the tokens from `begin` on."""
        reason = output.finish_reason
        last = output.token_ids[-1] if output.token_ids else None
        stopped = reason is t.FinishReason.STOP and last in (self._body.stop_token_ids or ())
        tail: Json = {
            "logprobs": self._logprobs_from(output, begin) if self._logprobs else None,
            "finish_reason": None if reason is None else FINISH_REASONS[reason],
            "stop_reason": output.stop_string or (last if stopped else None),
        }
        if self._body.return_token_ids:
            tail["token_ids"] = output.token_ids[begin:]
        if reason is not None and output.prompt_logprobs is not None:
            tail["prompt_logprobs"] = self._prompt(output, output.prompt_logprobs)
        if reason is not None:
            tail["weight_versions"] = weight_versions(output.version_spans)
        return tail

    def _logprobs_from(self, output: SampleOutput, begin: int) -> Json:
        sampled = self._named(output.token_ids[begin:], output.logprobs[begin:])
        likeliest = [
            self._named(*each)
            for each in zip(output.top_token_ids[begin:], output.top_logprobs[begin:], strict=True)
        ] or [[] for _ in sampled]
        if self._chat:
            content = [
                {**_entry(*token), "top_logprobs": [_entry(*each) for each in others]}
                for token, others in zip(sampled, likeliest, strict=True)
            ]
            return {"content": content}
        return {
            "tokens": [name for name, _ in sampled],
            "token_logprobs": [value for _, value in sampled],
            "top_logprobs": [
                dict([token, *others]) for token, others in zip(sampled, likeliest, strict=True)
            ],
            "text_offset": [],
        }

    def _prompt(self, output: SampleOutput, told: t.PromptLogprobs) -> list[Json | None]:
        """Return what is told of each token of the prompt: nothing of the first."""
        found: list[Json | None] = [None]
        columns = (told.logprobs.tolist(), told.top_token_ids.tolist(), told.top_logprobs.tolist())
        for token, own, ids, values in zip(output.request.prompt_token_ids[1:], *columns, strict=True):
            entries: dict[int, tuple[float, int | None]] = {int(token): (own, None)}
            entries |= {
                each: (value, rank + 1) for rank, (each, value) in enumerate(zip(ids, values, strict=True))
            }
            found.append(
                {
                    str(each): {
                        "logprob": finite([value])[0],
                        "rank": rank,
                        "decoded_token": self._name(each),
                    }
                    for each, (value, rank) in entries.items()
                }
            )
        return found

    def _named(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> list[tuple[str, float]]:
        return list(zip(map(self._name, token_ids), finite(list(logprobs)), strict=True))

    def _name(self, token: int) -> str:
        if self._tokenizer is None or self._body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self._tokenizer.token(token)


def _entry(name: str, logprob: float) -> Json:
    return {"token": name, "logprob": logprob, "bytes": None}


def usage(outputs: Sequence[SampleOutput], samples: int) -> Json:
    """Return the numbers of tokens: each prompt is counted once, however many samples it has."""
    prompt = sum(len(output.request.prompt_token_ids) for output in outputs[::samples])
    completion = sum(len(output.token_ids) for output in outputs)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
