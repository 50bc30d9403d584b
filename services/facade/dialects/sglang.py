"""Read the bodies of SGLang's native server and write its answers, whole or as events. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import PrivateAttr

from paceline import types as t
from paceline.errors import Violation
from services.contracts.errors import InvalidArgument
from services.facade.dialects.body import (
    FINISH_REASONS,
    Body,
    Limits,
    Part,
    RequestedSamples,
    SamplesBody,
    TokenId,
    as_it_is,
    check_unsupported,
    checked_count,
    checked_likeliest,
    finite,
    identity_of,
    requested_samples,
    run_seed,
    stops_of,
    token_ids_of,
    top_k_of,
    weight_versions,
)
from services.facade.samples import SampleOutput
from services.facade.text import Tokenizer, longest_beginning, needs_text, settled, text_of

Json = dict[str, Any]

NEUTRAL: dict[str, Sequence[Any]] = {
    "audio_data": ([],),
    "background": (False,),
    "custom_logit_processor": (),
    "image_data": ([],),
    "input_embeds": (),
    "log_metrics": (True, False),
    "lora_path": (),
    "modalities": ([],),
    "no_logs": (True, False),
    "priority": (0,),
    "return_bytes": (False,),
    "return_entropy": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "routed_experts_start_len": (0,),
    "session_params": (),
    "token_ids_logprob": (),
    "video_data": ([],),
}
"""Unsupported parameters of SGLang and its router, with their neutral values."""
NEUTRAL_SAMPLING: dict[str, Sequence[Any]] = {
    "custom_params": ({},),
    "ebnf": (),
    "logit_bias": ({},),
    "regex": (),
    "stop_regex": ([], ""),
    "stream_interval": (),
    "structural_tag": (),
}
"""Unsupported sampling parameters likewise."""
_SAMPLING = (
    *("frequency_penalty", "ignore_eos", "json_schema", "min_p", "n", "presence_penalty"),
    *("repetition_penalty", "stop", "stop_token_ids", "temperature", "top_k", "top_p"),
)
NAMES = {
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "prompt": "input_ids",
    "prompt_logprobs": "top_logprobs_num",
    "top_logprobs": "top_logprobs_num",
    **{name: f"sampling_params.{name}" for name in _SAMPLING},
}
"""SGLang's names of parameters, where they differ from the SDK's."""
_SEED = "sampling_params.sampling_seed"


class SglangSampling(Body):
    """Sampling parameters, under SGLang's names and with SGLang's defaults."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 is off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    stop_token_ids: list[TokenId] | None = None
    stop: str | list[str] | None = None
    """Strings that end a sample."""
    json_schema: str | None = None
    """JSON schema of the response, as text."""
    ignore_eos: bool = False
    sampling_seed: int | None = None
    """With the same seed, the same request has the same samples. Left out: one is drawn."""
    skip_special_tokens: bool = True
    """True: the text has no special tokens."""
    no_stop_trim: bool = False
    """True: the text includes the token or the string that ended it."""
    spaces_between_special_tokens: bool = True
    """Has no effect."""


class GenerateBody(SamplesBody):
    """Body of /generate."""

    text: str | list[str] | None = None
    """Prompt, or several; or `input_ids`."""
    input_ids: list[TokenId] | list[list[TokenId]] | None = None
    model: str | None = None
    """Name of the model; must be the one that is served."""
    sampling_params: SglangSampling | None = None
    rid: str | None = None
    """Name of the request, for /abort_request."""
    return_logprob: bool = False
    """True: `meta_info` has `output_token_logprobs`."""
    logprob_start_len: int = -1
    """With `return_logprob`: `meta_info` has log-probabilities of the prompt from this token on; -1: none."""
    top_logprobs_num: int = 0
    """With `return_logprob`: number of likeliest tokens at each position, at most 20."""
    return_text_in_logprobs: bool = False
    stream: bool = False
    _several: bool = PrivateAttr(False)

    @property
    def several(self) -> bool:
        """True if the answer to the prepared body is a list."""
        return self._several

    def names_in_body(self) -> Mapping[str, str]:
        """Return the names of parameters in this body."""
        return NAMES

    def samples(self, tokenizer: Tokenizer | None, limits: Limits) -> RequestedSamples:
        """Return the requested samples."""
        given = self.sampling_params or SglangSampling()
        check_unsupported(self, NEUTRAL)
        check_unsupported(given, NEUTRAL_SAMPLING, "sampling_params.", self)
        limits.check_model(self.model)
        each = checked_count(given.n, "sampling_params.n")
        prompts, several = prompts_of(self, tokenizer, limits)
        self._several = several or each > 1
        seed, field = run_seed(given.sampling_seed, _SEED), _SEED
        return requested_samples(prompts, each, sampling_of(given, self), seed, limits, NAMES, field)

    def drop_prompts(self) -> None:
        """Drop the prompts."""
        self.text = self.input_ids = None
        if self.sampling_params is not None:
            self.sampling_params.__pydantic_extra__ = {}


class AbortRequestBody(Body):
    """Body of /abort_request."""

    rid: str = ""
    """Beginning of the names of the requests."""
    abort_all: bool = False

    def prepare(self, tokenizer: Tokenizer | None, limits: Limits | None) -> None:
        """Check the parameters that have no field."""
        check_unsupported(self, {"abort_message": ()})


class PauseBody(Body):
    """Body of /pause_generation."""

    mode: str = "abort"
    """`abort` ends running requests; `retract` and `in_place` let them continue, under the new weights after an
    update. New requests wait in each mode."""

    def prepare(self, tokenizer: Tokenizer | None, limits: Limits | None) -> None:
        """Parameters that have no field have no effect."""


class UpdateFromDiskBody(Body):
    """Body of /update_weights_from_disk."""

    model_path: str
    """Folder of the weights, as the instances see it."""
    weight_version: str | int | None = None
    """New version, if it is a number above the published version; otherwise the next version."""
    abort_all_requests: bool = False
    """True: unfinished samples end; otherwise they continue under the new weights."""
    flush_cache: bool = True
    """Has no effect: KV of other weights is never used."""
    load_format: str | None = None
    """Has no effect: the format of a folder is detected."""

    def prepare(self, tokenizer: Tokenizer | None, limits: Limits | None) -> None:
        """Check the parameters that have no field."""
        check_unsupported(self, UPDATE_NEUTRAL)


UPDATE_NEUTRAL: dict[str, Sequence[Any]] = {
    "abort_all_request": (True, False),
    "is_async": (False,),
    "keep_pause": (False,),
    "recapture_cuda_graph": (True, False),
    "token_step": (0,),
    "torch_empty_cache": (True, False),
}
"""Neutral values of parameters of an update; `abort_all_request` is a typing error in AReaL."""


def sampling_of(given: SglangSampling, body: GenerateBody | None = None) -> t.SamplingParams:
    """Return the sampling parameters; log-probabilities belong to the distribution that is sampled from."""
    likeliest = (
        checked_likeliest(body.top_logprobs_num, "top_logprobs_num") if body and body.return_logprob else 0
    )
    of_prompt = body is not None and body.return_logprob and body.logprob_start_len >= 0
    return t.SamplingParams(
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=top_k_of(given.top_k),
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        max_tokens=given.max_new_tokens,
        min_tokens=given.min_new_tokens,
        stop_token_ids=tuple(given.stop_token_ids or ()),
        stop=stops_of(given.stop),
        ignore_eos=given.ignore_eos,
        json_schema=given.json_schema or "",
        top_logprobs=likeliest,
        prompt_logprobs=likeliest if of_prompt else None,
        # Greedy sampling has a distribution of one token, whose log-probability is always 0.
        logprobs_mode=t.LogprobsMode.PROCESSED if given.temperature else t.LogprobsMode.RAW,
    )


def prompts_of(
    body: GenerateBody, tokenizer: Tokenizer | None, limits: Limits | None = None
) -> tuple[list[list[int]], bool]:
    """Return the token ids of the prompts, and True if they are a list, which gets a list of answers."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidArgument(
            [Violation("input_ids", "either input_ids or text must be given, and not both")]
        )
    if body.text is not None:
        needs_text(tokenizer, "text")
        texts = [body.text] if isinstance(body.text, str) else body.text
        prompts, several = token_ids_of(texts, "text", tokenizer, limits), isinstance(body.text, list)
    else:
        ids = body.input_ids or []
        several = bool(ids) and isinstance(ids[0], list)
        prompts = ids if several else [ids]  # type: ignore[assignment, list-item]
    if not prompts or not all(prompts):
        raise InvalidArgument([Violation("text" if body.text is not None else "input_ids", "is empty")])
    return prompts, several


def requested_version(given: str | int | None, published: int) -> int:
    """Return the new version of an update: the given one if it is a number above the published version."""
    try:
        requested = int(given) if given is not None else 0
    except ValueError:
        requested = 0
    return requested if published < requested < 1 << 63 else published + 1


class SglangWriter:
    """Writes the answer to one request, whole or as events. An event has all tokens so far, as in SGLang."""

    def __init__(
        self, body: GenerateBody, request_id: str, version: int | None, tokenizer: Tokenizer | None
    ) -> None:
        """`version` is the version of the weights for samples without a known one; None: it is left null."""
        self._body = body
        self._sampling = body.sampling_params or SglangSampling()
        self._several = body.several
        self._request_id = request_id
        self._version = version
        self._tokenizer = tokenizer

    def whole(self, outputs: Sequence[SampleOutput], part: Part = as_it_is) -> Json | list[Json]:
        """Return the answer, each sample written by `part`."""
        found = [part(self._one(index, output)) for index, output in enumerate(outputs)]
        return found if self._several else found[0]

    def events(self, changed: Sequence[tuple[int, SampleOutput]]) -> list[Json]:
        """Return an event for each changed sample, given with their places."""
        found = [(index, self._one(index, output)) for index, output in changed]
        return [{**event, "index": index} if self._several else event for index, event in found]

    def last_events(self, _outputs: Sequence[SampleOutput]) -> list[Json]:
        """Return no further events."""
        return []

    def _one(self, index: int, output: SampleOutput) -> Json:
        spans, provenance = output.version_spans, output.provenance
        version = spans[-1].policy_version if spans else self._version
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
            pairs = zip(finite(output.logprobs.tolist()), output.token_ids, strict=True)
            info["output_token_logprobs"] = [[value, token, self._text_of(token)] for value, token in pairs]
            if output.prompt_logprobs is not None:
                info |= self._prompt(output, output.prompt_logprobs)
            if self._body.top_logprobs_num:
                info["output_top_logprobs"] = [
                    [
                        [value, token, self._text_of(token)]
                        for value, token in zip(finite(values), tokens, strict=True)
                    ]
                    for tokens, values in output.columns.top_rows()
                ]
        return {"text": self._text(output), "output_ids": output.token_ids.tolist(), "meta_info": info}

    def _prompt(self, output: SampleOutput, logprobs: t.PromptLogprobs) -> Json:
        """Return the log-probabilities of the prompt from the requested token on; the first token has none."""
        begin, tokens = (
            self._body.logprob_start_len,
            [int(token) for token in output.request.prompt_token_ids],
        )
        own = [None, *finite(logprobs.logprobs.tolist())]
        entries = [[value, token, self._text_of(token)] for value, token in zip(own, tokens, strict=True)]
        likeliest: list[list[Any] | None] = [None]
        for values, ids in zip(logprobs.top_logprobs.tolist(), logprobs.top_token_ids.tolist(), strict=True):
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
        if output.finish_reason is None:
            # The end of the text may be the beginning of a stop string.
            stop = stops_of(self._sampling.stop) if trims else ()
            text = self._tokenizer.decode(settled(output.token_ids, stop), skip_special)
            return text[: max(0, len(text) - longest_beginning(stop))]
        stopped = output.finish_reason is t.FinishReason.STOP and trims
        return self._tokenizer.decode(output.token_ids[:-1] if stopped else output.token_ids, skip_special)

    def _text_of(self, token: int) -> str | None:
        if self._tokenizer is None or not self._body.return_text_in_logprobs:
            return None
        return self._tokenizer.token(token)


def _finish_reason(output: SampleOutput) -> Json | None:
    if output.finish_reason is None:
        return None
    kind = FINISH_REASONS[output.finish_reason]
    if kind == "stop":
        # A sample that is resumed after its end has no new token.
        return {"type": kind, "matched": output.stop_string or (output.token_ids or output.prompt)[-1]}
    if kind == "length":
        return {"type": kind, "length": len(output.token_ids)}
    return {"type": kind, "message": "Aborted"}
