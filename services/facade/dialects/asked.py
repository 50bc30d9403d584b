"""Samples that a body asks for, with its prompts as arrays, and the checks that bound their size. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
from pydantic import PrivateAttr

from paceline import types as t
from paceline.errors import Violation
from services.contracts.errors import InvalidArgument
from services.contracts.sampling import MOST_ALLOWED, MOST_STOP_STRINGS
from services.contracts.schemas.walk import LONGEST_SCHEMA
from services.facade.dialects.parameters import Body, check_samples, check_whole_numbers, prompt_id_of
from services.facade.text import Tokenizer, check_text, needs_text

Ids = Sequence[int] | npt.NDArray[np.int64]
MOST_STOP_TOKENS = 4096
"""Most stop token ids of a request; each of its samples sends them."""


class ModelNotServed(InvalidArgument):
    """Raised for a request that names another model than the one that is served: 404, as of vLLM and OpenAI."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "MODEL_NOT_FOUND"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a body is checked against: the model that is served, and the limits of the facade."""

    model: str
    vocab_size: int
    max_model_len: int
    logprobs_mode: t.LogprobsMode = t.LogprobsMode.RAW
    max_samples: int = 4096
    max_hinted_samples: int = 262_144
    trust_request_chat_template: bool = False
    prefix: int = 0
    """Tokens at the end of each prompt that are the beginning of its response."""
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters of vLLM's dialect that a request leaves out."""

    def check_model(self, asked: str | None) -> None:
        """Raise ModelNotServed for a request that names another model."""
        if asked and asked != self.model:
            raise ModelNotServed([Violation("model", f"{asked!r} is not served; must be {self.model!r}")])


@dataclass(frozen=True, slots=True)
class SamplesAsked:
    """Samples that a request asks for, `each` of every prompt. `seed` is the request's own, if it has one."""

    prompts: Sequence[Ids]
    each: int
    sampling: t.SamplingParams
    seed: int | None
    seed_field: str = "seed"
    prompt_ids: Sequence[tuple[str, str]] = ()
    """Hashes of each prompt, whole and without its prefix; empty: they are computed when they are needed."""


def samples_asked(
    prompts: Sequence[Sequence[int]],
    each: int,
    sampling: t.SamplingParams,
    seed: int | None,
    limits: Limits,
    names: Mapping[str, str],
    seed_field: str = "seed",
) -> SamplesAsked:
    """Return checked samples, their prompts as arrays and hashed. `names` are those of the body.

    InvalidArgument: there are too many, a prompt leaves no room, or a number or an id is out of range.
    """
    check_whole_numbers(prompts, sampling, names, limits.vocab_size)
    check_samples(prompts, each, limits.max_samples, names)
    check_sizes(prompts, sampling, limits, names)
    arrays = [np.array(prompt, np.int64) for prompt in prompts]
    ids = [_ids(array, limits.prefix) for array in arrays]
    return SamplesAsked(arrays, each, sampling, seed, seed_field, ids)


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

    Before the first is tokenized, more of them than a request may have are refused, `hinted` ones or others. A text
    that cannot fit into the model is refused before it is tokenized.
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
    """Refuse what the gateway would refuse of each sample for its size, before it is sent once a sample."""
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


class AsksSamples(Body):
    """Body of a request for samples. Prepared, it has them with their prompts, and no prompts of its own."""

    of_model = True
    _asked: SamplesAsked | None = PrivateAttr(None)

    @property
    def asked(self) -> SamplesAsked:
        """Samples that the prepared body asks for."""
        assert self._asked is not None, "it is prepared"
        return self._asked

    def prepare(self, tokenizer: Tokenizer | None, limits: Limits | None) -> None:
        """Check the body, and make its prompts token ids."""
        assert limits is not None, "it is about a model"
        self._asked = self.samples(tokenizer, limits)
        self.drop_prompts()

    def samples(self, tokenizer: Tokenizer | None, limits: Limits) -> SamplesAsked:
        """Return the samples that the body asks for. InvalidArgument names what is wrong."""
        raise NotImplementedError

    def drop_prompts(self) -> None:
        """Forget the prompts, which `asked` has."""
        raise NotImplementedError
