"""Read the parts of a request body that all dialects share. Pure.

`Body` refuses unknown and unsupported parameters by name, unless their value is neutral. `SamplesBody` turns a body
into checked samples with their prompts as arrays. The checks bound the size of a request before anything is sent to
the gateway.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from types import NoneType
from typing import Annotated, Any, ClassVar, TypeVar, get_args

import grpc
import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, BaseModel, ConfigDict, PrivateAttr, Strict, model_validator

from paceline import types as t
from paceline.errors import Violation
from services.contracts.errors import InvalidArgument
from services.contracts.sampling import MOST_ALLOWED, MOST_STOP_STRINGS, MOST_TOP_LOGPROBS
from services.contracts.schemas import LONGEST_SCHEMA
from services.facade.text import Tokenizer, check_text, needs_text

LEAST_LOGPROB = -9999.0
"""Log-probability that replaces values which JSON cannot express, as in vLLM."""
T = TypeVar("T", int, int | None)
Part = Callable[[Any], Any]
"""Converts a part of an answer to JSON, or returns it unchanged."""
_MOST_REPORTED = 32
"""Most parameters that an error reports; a body may have hundreds of thousands."""
_LONGEST_ALIKE = 64
"""Longest unknown name that is compared with known ones."""
_SEEDS = range(-(1 << 63), 1 << 64)
_COUNTS = range(-(1 << 31), 1 << 31)
SAME_MEANING = (
    ("max_tokens", "max_new_tokens", "max_completion_tokens", "max_length"),
    ("min_tokens", "min_new_tokens"),
    ("seed", "sampling_seed", "random_seed"),
    ("n", "n_samples", "num_samples", "num_generations", "num_return_sequences"),
    ("prompt", "prompts", "text", "input_ids", "token_ids", "prompt_token_ids", "prompt_ids"),
    ("logprobs", "return_logprob", "return_logprobs"),
    ("logprobs", "top_logprobs", "top_logprobs_num"),
    ("request_id", "rid"),
    ("stop", "stop_strings", "stop_sequences"),
    ("stop_token_ids", "stop_token_id", "eos_token_id"),
    ("repetition_penalty", "rep_penalty"),
    ("weight_dir", "model_path", "path"),
    ("request_ids", "rids", "request_id", "rid"),
    ("structured_outputs", "response_format", "json_schema", "guided_json"),
)
"""Names that dialects and libraries have for the same parameter; of a body's own ones, the first is suggested."""
FINISH_REASONS: dict[t.FinishReason, str] = {
    t.FinishReason.STOP: "stop",
    t.FinishReason.LENGTH: "length",
    t.FinishReason.ABORTED: "abort",
    t.FinishReason.UNSPECIFIED: "abort",
}
"""Names of finish reasons in both dialects."""
Ids = Sequence[int] | npt.NDArray[np.int64]
MOST_STOP_TOKENS = 4096
"""Most stop token ids of a request; each of its samples sends them."""


class Body(BaseModel):
    """Body of a request. Parameters without a field are refused, unless their value is neutral."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True, protected_namespaces=())
    of_model: ClassVar[bool] = False
    """True: the body is checked against the served model."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        without_null = _without_null(cls)
        return {name: value for name, value in given.items() if value is not None or name not in without_null}

    def names_in_body(self) -> Mapping[str, str]:
        """Return the names of parameters in this body, where they differ from the SDK's."""
        return {}

    def prepare(self, tokenizer: Tokenizer | None, limits: Limits | None) -> None:
        """Check and convert the body, which takes time by its size and content. May run in another process.

        InvalidArgument names the wrong field. `limits` is None for a body that does not concern the model.
        """
        check_unsupported(self, {})


@cache
def _without_null(body: type[Body]) -> frozenset[str]:
    """Return the optional parameters for which null has no meaning, and so counts as left out."""
    return frozenset(
        name
        for name, field in body.model_fields.items()
        if not field.is_required() and NoneType not in get_args(field.annotation)
    )


TokenId = Annotated[int, Strict()]
"""Id of a token: a number. Texts and truth values are not converted."""
VllmSeed = Annotated[int | None, AfterValidator(lambda seed: None if seed == -1 else seed)]
"""Seed of vLLM's server; -1 counts as left out."""


def check_unsupported(
    body: Body, neutral: Mapping[str, Sequence[Any]], path: str = "", outer: Body | None = None
) -> None:
    """Refuse parameters that have no field, unless their value is neutral. InvalidArgument names each.

    `neutral` has the neutral values of known parameters, in addition to null, false and empty values. `path` is the
    place of the body in `outer`, if it is a part of that one.
    """
    found = []
    for name, value in (body.model_extra or {}).items():
        if name in neutral and not _is_neutral(value, neutral[name]):
            allowed = " or ".join(map(repr, neutral[name])) or "left out"
            found.append(Violation(path + name, f"is not supported; must be {allowed}"))
        elif name not in neutral and not _is_neutral(value, ()):
            meant = " or ".join(meant_instead(name, type(body), path, None if outer is None else type(outer)))
            way_out = f"did you mean {meant}?" if meant else "leave it out"
            found.append(Violation(path + name, f"is not known here; {way_out}"))
        if len(found) >= _MOST_REPORTED:
            break
    if found:
        raise InvalidArgument(found)


def meant_instead(name: str, body: type[Body], path: str = "", outer: type[Body] | None = None) -> list[str]:
    """Return the parameters that an unknown one may stand for, with their paths; at most two, the likeliest first.

    Other dialects' names for the same thing come before names that are spelled alike.
    """
    fields = _fields(body, path)
    if outer is not None:
        fields = {**_fields(outer, ""), **fields}
    groups = [group for group in SAME_MEANING if name in group]
    # Without duplicates: a name may be in several groups.
    same = list(dict.fromkeys(each for group in groups for each in group if each in fields))
    # A comparison takes time by the length of the name, which the caller chooses.
    alike = get_close_matches(name, fields, n=1, cutoff=0.8) if len(name) <= _LONGEST_ALIKE else []
    known = [name] if name in fields else []
    return [fields[each] for each in (known or same or alike)[:2]]


@cache
def _fields(body: type[Body], path: str) -> dict[str, str]:
    """Return the names of a body's fields with their paths; also of the bodies in it."""
    found: dict[str, str] = {}
    for name, each in body.model_fields.items():
        for kind in (each.annotation, *get_args(each.annotation)):
            if isinstance(kind, type) and issubclass(kind, Body):
                found |= _fields(kind, f"{path}{name}.")
    return found | {name: path + name for name in body.model_fields}


def _is_neutral(value: Any, neutral: Sequence[Any]) -> bool:
    if value is False and True in neutral:
        # The parameter is on by default, so false is a request.
        return False in neutral
    return value is None or value is False or value in ("", [], {}) or value in neutral


def run_seed(seed: int | None, field: str = "seed") -> int | None:
    """Return the 64-bit run seed for the seed of a request, if it has one."""
    if seed is None:
        return None
    if seed not in _SEEDS:
        raise InvalidArgument([Violation(field, f"{seed} is not allowed; must be in [-2**63, 2**64)")])
    return seed % (1 << 64)


def prompt_id_of(token_ids: Sequence[int] | npt.NDArray[np.int64]) -> str:
    """Return the id of a prompt: a hash of its tokens."""
    return hashlib.blake2b(np.asarray(token_ids, dtype="<i8").tobytes(), digest_size=16).hexdigest()


def check_samples(
    prompts: Sequence[Sequence[int]], samples: int, most: int, names: Mapping[str, str]
) -> None:
    """Refuse a request for more than `most` samples, with `samples` of each prompt."""
    if len(prompts) * samples > most:
        description = (
            f"{samples} samples of {len(prompts)} prompts are more than {most}, the most of a request"
        )
        name = "prompt" if len(prompts) > most else "n"
        raise InvalidArgument([Violation(names.get(name, name), description)])


def check_whole_numbers(
    prompts: Sequence[Sequence[int]], sampling: t.SamplingParams, names: Mapping[str, str], vocab_size: int
) -> None:
    """Refuse integers outside the range of the protocol, and ids outside the vocabulary.

    The gateway checks the rest.
    """
    found = [
        Violation(names.get(name, name), _not_in(value, _COUNTS))
        for name in ("max_tokens", "min_tokens", "top_k")
        if (value := getattr(sampling, name)) is not None and value not in _COUNTS
    ]
    ids = range(vocab_size)
    for name in ("stop_token_ids", "allowed_token_ids"):
        given = getattr(sampling, name)
        if (place := _first_outside(given, ids)) is not None:
            text = f"{_not_in(given[place], ids)}, the model's vocabulary"
            found.append(Violation(f"{names.get(name, name)}[{place}]", text))
    for number, prompt in enumerate(prompts):
        if (place := _first_outside(prompt, ids)) is not None:
            text = f"{_not_in(prompt[place], ids)}, the model's vocabulary (token {place} of prompt {number})"
            found.append(Violation(names.get("prompt", "prompt"), text))
            break
    if found:
        raise InvalidArgument(found)


def _first_outside(ids: Sequence[int], allowed: range) -> int | None:
    # Nearly always there is none; min and max find that out in C.
    if not ids or (min(ids) in allowed and max(ids) in allowed):
        return None
    return next(place for place, token in enumerate(ids) if token not in allowed)


def _not_in(value: int, allowed: range) -> str:
    return f"{value} is not allowed; must be in [{allowed.start}, {allowed.stop})"


def check_token_ids(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Refuse ids outside the vocabulary."""
    check_whole_numbers([token_ids], t.SamplingParams(), {"prompt": field}, vocab_size)


def checked_count(samples: int, field: str = "n") -> int:
    """Return the number of samples of a prompt; InvalidArgument unless it is at least 1."""
    if samples < 1:
        raise InvalidArgument([Violation(field, f"{samples} is not allowed; must be >= 1")])
    return samples


def checked_likeliest(count: T, field: str) -> T:
    """Return the requested number of likeliest tokens; InvalidArgument unless it is in the allowed range."""
    if count is not None and not 0 <= count <= MOST_TOP_LOGPROBS:
        found = f"{count} is not allowed; must be in [0, {MOST_TOP_LOGPROBS}]"
        raise InvalidArgument([Violation(field, found)])
    return count


def stops_of(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the stop strings of a body: one, several or none."""
    return ((stop,) if stop else ()) if stop is None or isinstance(stop, str) else tuple(stop)


def top_k_of(top_k: int | None) -> int | None:
    """Return the SDK's top_k, for which 0 is off; in the dialects -1 is off."""
    return 0 if top_k == -1 else top_k


def as_it_is(part: Any) -> Any:
    """Return a part of an answer unchanged."""
    return part


def finite(logprobs: list[float]) -> list[float]:
    """Return log-probabilities that JSON can express."""
    # Nearly always all are finite; sum and min find that out in C. A loop in Python would dominate the writing.
    if not logprobs or (math.isfinite(sum(logprobs)) and min(logprobs) >= LEAST_LOGPROB):
        return logprobs
    return [max(value, LEAST_LOGPROB) if math.isfinite(value) else LEAST_LOGPROB for value in logprobs]


def identity_of(request: t.SampleRequest) -> dict[str, Any]:
    """Return the identity of a sample, by which its reward is reported."""
    return {"step": request.step, "prompt_id": request.prompt_id, "slot": request.slot}


def weight_versions(spans: Iterable[t.VersionSpan]) -> list[dict[str, Any]]:
    """Return the weight versions that sampled the tokens of a sample, in vLLM's form."""
    return [
        {"version": str(span.policy_version), "start": span.begin, "end": span.end}
        | ({"mixed_kv": True} if span.mixed_kv else {})
        for span in spans
    ]


class ModelNotServed(InvalidArgument):
    """Raised if a request names another model than the served one: 404, as in vLLM and OpenAI's API."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "MODEL_NOT_FOUND"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for a body: the names of the served model and its sizes, and the limits of the facade."""

    models: Sequence[str]
    vocab_size: int
    max_model_len: int
    logprobs_mode: t.LogprobsMode = t.LogprobsMode.RAW
    max_samples: int = 4096
    max_hinted_samples: int = 262_144
    trust_request_chat_template: bool = False
    prefix: int = 0
    """Tokens at the end of each prompt that are the beginning of its response."""
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters of vLLM's dialect for requests that leave them out."""

    def check_model(self, named: str | None) -> None:
        """Raise ModelNotServed for a request that names another model."""
        if named and named not in self.models:
            served = " or ".join(map(repr, self.models))
            raise ModelNotServed([Violation("model", f"{named!r} is not served; must be {served}")])


@dataclass(frozen=True, slots=True)
class RequestedSamples:
    """Samples that a request asks for: `each` of every prompt. `seed` is the seed of the request, if any."""

    prompts: Sequence[Ids]
    each: int
    sampling: t.SamplingParams
    seed: int | None
    seed_field: str = "seed"
    prompt_ids: Sequence[tuple[str, str]] = ()
    """Hashes of each prompt, whole and without its prefix; empty: they are computed on demand."""


def requested_samples(
    prompts: Sequence[Sequence[int]],
    each: int,
    sampling: t.SamplingParams,
    seed: int | None,
    limits: Limits,
    names: Mapping[str, str],
    seed_field: str = "seed",
) -> RequestedSamples:
    """Return checked samples, with their prompts hashed and as arrays.

    `names` has the names of parameters in the body, where they differ from the SDK's. InvalidArgument: there are
    too many samples, a prompt leaves no room, or a number or an id is out of range.
    """
    check_whole_numbers(prompts, sampling, names, limits.vocab_size)
    check_samples(prompts, each, limits.max_samples, names)
    check_sizes(prompts, sampling, limits, names)
    arrays = [np.array(prompt, np.int64) for prompt in prompts]
    ids = [_ids(array, limits.prefix) for array in arrays]
    return RequestedSamples(arrays, each, sampling, seed, seed_field, ids)


def token_ids_of(
    prompts: Sequence[Any],
    field: str,
    tokenizer: Tokenizer | None,
    limits: Limits | None,
    *,
    special: bool = True,
    hinted: bool = False,
) -> list[list[int]]:
    """Return the token ids of prompts that are texts or token ids. InvalidArgument: there is no tokenizer.

    Too many prompts for a request, or for a hint if `hinted`, are refused before any is tokenized. So is a text
    that cannot fit into the model.
    """
    most = limits.max_model_len if limits is not None else None
    if limits is not None:
        most_prompts = limits.max_hinted_samples if hinted else limits.max_samples
        check_samples(prompts, 1, most_prompts, {"prompt": field})
    found = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            place = f"{field}[{index}]" if len(prompts) > 1 else field
            known = needs_text(tokenizer, field)
            check_text(prompt, known, most, place)
            found.append(known.encode(prompt, special))
        else:
            found.append(prompt)
    return found


def check_sizes(
    prompts: Sequence[Sequence[int]], sampling: t.SamplingParams, limits: Limits, names: Mapping[str, str]
) -> None:
    """Refuse sizes that the gateway would refuse, before they are sent once for each sample."""
    found = []
    longest = max(map(len, prompts), default=0)
    if longest >= limits.max_model_len:
        text = f"{longest} prompt tokens leave no room to generate; the model takes {limits.max_model_len} in all"
        found.append(Violation(names.get("prompt", "prompt"), text))
    for name, most, what in (
        ("stop", MOST_STOP_STRINGS, "strings"),
        ("stop_token_ids", MOST_STOP_TOKENS, "token ids"),
        ("allowed_token_ids", MOST_ALLOWED, "token ids"),
    ):
        if (count := len(getattr(sampling, name))) > most:
            found.append(Violation(names.get(name, name), f"has {count} {what}; at most {most}"))
    if len(sampling.json_schema) > LONGEST_SCHEMA:
        text = f"has {len(sampling.json_schema)} characters; at most {LONGEST_SCHEMA} bytes"
        found.append(Violation(names.get("json_schema", "json_schema"), text))
    if found:
        raise InvalidArgument(found)


def _ids(prompt: npt.NDArray[np.int64], prefix: int) -> tuple[str, str]:
    whole = prompt_id_of(prompt)
    return whole, prompt_id_of(prompt[: len(prompt) - prefix]) if 0 < prefix < len(prompt) else whole


class SamplesBody(Body):
    """Body of a request for samples. Once prepared, it has the samples, and its own prompts are dropped."""

    of_model = True
    _requested: RequestedSamples | None = PrivateAttr(None)

    @property
    def requested(self) -> RequestedSamples:
        """Samples that the prepared body requests."""
        assert self._requested is not None, "it is prepared"
        return self._requested

    def prepare(self, tokenizer: Tokenizer | None, limits: Limits | None) -> None:
        """Check the body, and convert its prompts to token ids."""
        assert limits is not None, "it is about a model"
        self._requested = self.samples(tokenizer, limits)
        self.drop_prompts()

    def samples(self, tokenizer: Tokenizer | None, limits: Limits) -> RequestedSamples:
        """Return the requested samples. InvalidArgument names the wrong field."""
        raise NotImplementedError

    def drop_prompts(self) -> None:
        """Drop the prompts, which `requested` has."""
        raise NotImplementedError
