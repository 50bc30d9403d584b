"""Bodies of vLLM's server, which are those of OpenAI's API and what vLLM adds to them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from paceline import types as t
from paceline.errors import Violation
from services.contracts.errors import InvalidArgument
from services.facade.dialects.parameters import FINISH_REASONS, Body, finite, top_k_of, weight_versions
from services.facade.samples import SampleOutput
from services.facade.text import TextStream, Tokenizer, needs_text

Json = dict[str, Any]

NEUTRAL: dict[str, Sequence[Any]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "detokenize": (True,),
    "echo": (False,),
    "guided_decoding": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0,),
    "logit_bias": ({},),
    "no_stop_trim": (False,),
    "priority": (0,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "separate_reasoning": (True, False),
    "spaces_between_special_tokens": (True,),
    "stop": ([], ""),
    "stream_reasoning": (True, False),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
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
    """0: those of the sampled tokens. More are not supported."""
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
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    """Template in place of the model's."""
    chat_template_kwargs: Json | None = None


def sampling_of(
    body: SamplingFields, max_tokens: int | None, logprobs_mode: t.LogprobsMode
) -> t.SamplingParams:
    """Return the sampling parameters of a body."""
    return t.SamplingParams(
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
        ignore_eos=body.ignore_eos,
        logprobs_mode=logprobs_mode,
    )


def completion_prompts(body: CompletionBody, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Return the token ids of a body's prompts. InvalidArgument: there is none, or text and no tokenizer."""
    if body.logprobs:
        found = f"{body.logprobs} is not supported; 0 gives those of the sampled tokens"
        raise InvalidArgument([Violation("logprobs", found)])
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
            text = self._tokenizer.decode(output.token_ids, self._body.skip_special_tokens)
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
        stream = self._texts.setdefault(index, TextStream(self._tokenizer, self._body.skip_special_tokens))
        text = stream.grow(output.token_ids, ended)
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

    def _tail(self, output: SampleOutput, begin: int) -> Json:
        """Return what a choice has beside its text, of the tokens from `begin` on."""
        reason = output.finish_reason
        last = output.token_ids[-1] if output.token_ids else None
        stopped = reason is t.FinishReason.STOP and last in (self._body.stop_token_ids or ())
        tail: Json = {
            "logprobs": self._logprobs_from(output, begin) if self._logprobs else None,
            "finish_reason": None if reason is None else FINISH_REASONS[reason],
            "stop_reason": last if stopped else None,
        }
        if self._body.return_token_ids:
            tail["token_ids"] = output.token_ids[begin:]
        if reason is not None:
            tail["weight_versions"] = weight_versions(output.version_spans)
        return tail

    def _logprobs_from(self, output: SampleOutput, begin: int) -> Json:
        names = [self._name(token) for token in output.token_ids[begin:]]
        values = finite(output.logprobs[begin:])
        if self._chat:
            return {
                "content": [
                    {"token": name, "logprob": value, "bytes": None, "top_logprobs": []}
                    for name, value in zip(names, values, strict=True)
                ]
            }
        return {
            "tokens": names,
            "token_logprobs": values,
            "top_logprobs": [{name: value} for name, value in zip(names, values, strict=True)],
            "text_offset": [],
        }

    def _name(self, token: int) -> str:
        if self._tokenizer is None or self._body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self._tokenizer.token(token)


def usage(outputs: Sequence[SampleOutput], samples: int) -> Json:
    """Return the numbers of tokens: each prompt is counted once, however many samples it has."""
    prompt = sum(len(output.request.prompt_token_ids) for output in outputs[::samples])
    completion = sum(len(output.token_ids) for output in outputs)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
