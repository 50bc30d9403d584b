"""Answers of SGLang's native server, whole or as events. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline import types as t
from services.facade.dialects.parameters import (
    FINISH_REASONS,
    Part,
    as_it_is,
    finite,
    identity_of,
    stops_of,
    weight_versions,
)
from services.facade.dialects.sglang import GenerateBody, SglangSampling
from services.facade.samples import SampleOutput
from services.facade.text import Tokenizer, longest_beginning, text_of

Json = dict[str, Any]


class SglangWriter:
    """Writes the answer to one request, whole or as events. Events have all tokens so far, as SGLang's do."""

    def __init__(
        self, body: GenerateBody, several: bool, request_id: str, tokenizer: Tokenizer | None
    ) -> None:
        """With `several`, the answer is a list."""
        self._body = body
        self._sampling = body.sampling_params or SglangSampling()
        self._several = several
        self._request_id = request_id
        self._tokenizer = tokenizer

    def whole(
        self, outputs: Sequence[SampleOutput], version: int, part: Part = as_it_is
    ) -> Json | list[Json]:
        """Return the answer, each sample a part; `version` is that of samples that do not know their own."""
        found = [part(self._one(index, output, version)) for index, output in enumerate(outputs)]
        return found if self._several else found[0]

    def events(self, changed: Sequence[tuple[int, SampleOutput]]) -> list[Json]:
        """Return an event for every sample that has something new; they come with their places."""
        found = [(index, self._one(index, output, None)) for index, output in changed]
        return [{**event, "index": index} if self._several else event for index, event in found]

    def _one(self, index: int, output: SampleOutput, version: int | None) -> Json:
        spans, provenance = output.version_spans, output.provenance
        version = spans[-1].policy_version if spans else version
        info: Json = {
            "id": f"{self._request_id}_{index}" if self._several else self._request_id,
            "finish_reason": _finish_reason(output),
            "prompt_tokens": output.prompt_tokens,
            "completion_tokens": len(output.token_ids),
            "cached_tokens": 0,
            "weight_version": None if version is None else str(version),
            "weight_versions": weight_versions(spans),
            "paceline": identity_of(output.request),
            "spec_accept_token_num": provenance.accepted,
            "spec_draft_token_num": provenance.drafted,
            "spec_verify_ct": provenance.verify_steps,
        }
        if self._body.return_logprob:
            pairs = zip(finite(output.logprobs), output.token_ids, strict=True)
            info["output_token_logprobs"] = [[value, token, self._text_of(token)] for value, token in pairs]
            if output.prompt_logprobs is not None:
                info |= self._prompt(output, output.prompt_logprobs)
            if self._body.top_logprobs_num:
                info["output_top_logprobs"] = [
                    [
                        [value, token, self._text_of(token)]
                        for value, token in zip(finite(values), tokens, strict=True)
                    ]
                    for values, tokens in zip(output.top_logprobs, output.top_token_ids, strict=True)
                ]
        return {"text": self._text(output), "output_ids": output.token_ids, "meta_info": info}

    def _prompt(self, output: SampleOutput, told: t.PromptLogprobs) -> Json:
        """Return the log-probabilities of the prompt's tokens from the one asked for on; the first has none."""
        begin, tokens = (
            self._body.logprob_start_len,
            [int(token) for token in output.request.prompt_token_ids],
        )
        own = [None, *finite(told.logprobs.tolist())]
        entries = [[value, token, self._text_of(token)] for value, token in zip(own, tokens, strict=True)]
        likeliest: list[list[Any] | None] = [None]
        for values, ids in zip(told.top_logprobs.tolist(), told.top_token_ids.tolist(), strict=True):
            pairs = zip(finite(values), ids, strict=True)
            likeliest.append([[value, token, self._text_of(token)] for value, token in pairs])
        found: Json = {"input_token_logprobs": entries[begin:]}
        return found | ({"input_top_logprobs": likeliest[begin:]} if self._body.top_logprobs_num else {})

    def _text(self, output: SampleOutput) -> str:
        if self._tokenizer is None:
            return ""
        skip_special, trims = self._sampling.skip_special_tokens, not self._sampling.no_stop_trim
        if output.stop_string and trims:
            return text_of(self._tokenizer, output.token_ids, skip_special, output.stop_string)
        stopped = output.finish_reason is t.FinishReason.STOP and trims
        text = self._tokenizer.decode(output.token_ids[:-1] if stopped else output.token_ids, skip_special)
        # While it grows, its end may be the beginning of a stop string.
        held = (
            longest_beginning(stops_of(self._sampling.stop)) if output.finish_reason is None and trims else 0
        )
        return text[: max(0, len(text) - held)]

    def _text_of(self, token: int) -> str | None:
        if self._tokenizer is None or not self._body.return_text_in_logprobs:
            return None
        return self._tokenizer.token(token)


def whole_answer(
    body: GenerateBody,
    several: bool,
    request_id: str,
    version: int,
    tokenizer: Tokenizer | None,
    outputs: Sequence[SampleOutput],
    part: Part,
) -> Json | list[Json]:
    """Return the answer of `SglangWriter` with all samples."""
    return SglangWriter(body, several, request_id, tokenizer).whole(outputs, version, part)


def _finish_reason(output: SampleOutput) -> Json | None:
    if output.finish_reason is None:
        return None
    kind = FINISH_REASONS[output.finish_reason]
    if kind == "stop":
        # One that is resumed after its end has no token of its own.
        return {"type": kind, "matched": output.stop_string or (output.token_ids or output.prompt)[-1]}
    if kind == "length":
        return {"type": kind, "length": len(output.token_ids)}
    return {"type": kind, "message": "Aborted"}
