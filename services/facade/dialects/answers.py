"""Write the answers of `/v1/completions` and `/v1/chat/completions`, whole or as events. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from paceline import types as t
from services.facade.dialects.body import (
    FINISH_REASONS,
    Part,
    as_it_is,
    finite,
    identity_of,
    stops_of,
    weight_versions,
)
from services.facade.dialects.vllm import SamplingBody
from services.facade.samples import SampleOutput
from services.facade.text import TextStream, Tokenizer, text_of

Json = dict[str, Any]
Kind = Literal["completion", "chat"]


class AnswerWriter:
    """Writes the answer to one request, whole or as events."""

    def __init__(
        self, body: SamplingBody, kind: Kind, head: tuple[str, int, str], tokenizer: Tokenizer | None
    ) -> None:
        """`head` is the answer's id, its time (seconds since the epoch) and the name of the model."""
        self._body = body
        self._chat = kind == "chat"
        self._head = head
        self._tokenizer = tokenizer
        self._sent: dict[int, int] = {}
        self._texts: dict[int, TextStream] = {}
        self._ended: set[int] = set()
        self._stop = () if body.include_stop_str_in_output else stops_of(body.stop)
        self._logprobs = body.has_logprobs()

    def whole(self, outputs: Sequence[SampleOutput], part: Part = as_it_is) -> Json:
        """Return the answer with all samples, each written by `part`."""
        answer = self._object("" if not self._chat else "chat.completion")
        answer["choices"] = [part(self._choice(index, output)) for index, output in enumerate(outputs)]
        answer["usage"] = usage(outputs, self._body.n)
        if self._chat and self._body.return_token_ids:
            answer["prompt_token_ids"] = outputs[0].prompt
        return answer

    def events(self, changed: Sequence[tuple[int, SampleOutput]]) -> list[Json]:
        """Return the events of changed samples, given with their places: their tokens since the last call."""
        return [event for index, output in changed if (event := self._event(index, output))]

    def last_events(self, outputs: Sequence[SampleOutput]) -> list[Json]:
        """Return the events that follow the samples: the numbers of tokens, if they were requested."""
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
            choice["prompt_token_ids"] = output.prompt
        return choice

    def _event(self, index: int, output: SampleOutput) -> Json | None:
        sent, ended = self._sent.get(index), output.finish_reason is not None
        if index in self._ended or (not ended and len(output.token_ids) <= (sent or 0)):
            return None
        if (stream := self._texts.get(index)) is None:
            stream = TextStream(self._tokenizer, self._body.skip_special_tokens, self._stop)
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
            (event if self._chat else choice)["prompt_token_ids"] = output.prompt
        self._sent[index] = len(output.token_ids)
        if ended:
            self._ended.add(index)
        return event

    def _trimmed(self, output: SampleOutput) -> str:
        """Return the stop string to cut off the text of a sample."""
        return "" if self._body.include_stop_str_in_output else output.stop_string

    def _tail(self, output: SampleOutput, begin: int) -> Json:
        """Return the fields of a choice in addition to its text, for the tokens from `begin` on."""
        reason = output.finish_reason
        last = output.token_ids[-1] if output.token_ids else None
        stopped = reason is t.FinishReason.STOP and last in (self._body.stop_token_ids or ())
        tail: Json = {
            "logprobs": self._logprobs_from(output, begin) if self._logprobs else None,
            "finish_reason": None if reason is None else FINISH_REASONS[reason],
            "stop_reason": output.stop_string or (last if stopped else None),
        }
        if self._body.return_token_ids:
            tail["token_ids"] = output.token_ids[begin:].tolist()
        if reason is not None and output.prompt_logprobs is not None:
            tail["prompt_logprobs"] = self._prompt(output, output.prompt_logprobs)
        if reason is not None:
            tail["weight_versions"] = weight_versions(output.version_spans)
            tail["paceline"] = identity_of(output.request)
        return tail

    def _logprobs_from(self, output: SampleOutput, begin: int) -> Json:
        sampled = self._named(output.token_ids[begin:], output.logprobs[begin:])
        likeliest = [self._named(*each) for each in output.columns.top_rows(begin)]
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

    def _prompt(self, output: SampleOutput, logprobs: t.PromptLogprobs) -> list[Json | None]:
        """Return the log-probabilities at each token of the prompt; the first has none."""
        found: list[Json | None] = [None]
        columns = (
            logprobs.logprobs.tolist(),
            logprobs.top_token_ids.tolist(),
            logprobs.top_logprobs.tolist(),
        )
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
    """Return the numbers of tokens. Each prompt is counted once, with any number of samples."""
    prompt = sum(output.prompt_tokens for output in outputs[::samples])
    completion = sum(len(output.token_ids) for output in outputs)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
