"""Fill in the defaults of sampling parameters and check their ranges. Pure.

The checks return every violation, each with the value and what is allowed instead, and never raise: the caller
decides whether a request or only one of its items is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import Violation
from paceline.transport.channel import MAX_MESSAGE_BYTES
from paceline.v1 import sample_pb2
from services.contracts.schemas import schema_faults

MOST_STOP_STRINGS, LONGEST_STOP_STRING = 16, 256
"""Most stop strings of a sample, and most bytes of one in UTF-8."""
MOST_TOP_LOGPROBS = 20
"""Most top tokens of a position that are reported."""
MOST_ALLOWED = 4096
"""Most token ids in `allowed_token_ids`."""
MAX_REPORTED = 5
"""Most invalid positions of a list of token ids that are named; further ones are only counted."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Allowed values of a number: `off`, or from `least` to `most`, excluding `least` if `open`."""

    least: float
    most: float
    off: float
    meaning: str = "off"
    """Effect of `off`."""
    open: bool = False

    def has(self, value: float) -> bool:
        """Return True for an allowed value; NaN fails every comparison."""
        least, most = _single(self.least), _single(self.most)
        return value == self.off or (least < value <= most if self.open else least <= value <= most)

    def __str__(self) -> str:
        return f"in {'(' if self.open else '['}{self.least}, {self.most}] ({self.off} is {self.meaning})"


def _single(value: float) -> float:
    """Return a limit as it arrives: the fields of a message have single precision."""
    single: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return single


# Beyond these, logits in single precision overflow, or their rounding errors exceed the noise.
_FINE, _COARSE = 0.0001, 10000
RANGES: dict[str, Bounds] = {
    "temperature": Bounds(_FINE, _COARSE, off=0, meaning="greedy"),
    "top_p": Bounds(0, 1, off=1, open=True),
    "top_k": Bounds(1, (1 << 31) - 1, off=0),
    "min_p": Bounds(0, 1, off=0),
    "repetition_penalty": Bounds(_FINE, _COARSE, off=1),
    "presence_penalty": Bounds(-2, 2, off=0),
    "frequency_penalty": Bounds(-2, 2, off=0),
}
"""Allowed values of the parameters that are single numbers."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters; fields as in `paceline.v1.SamplingParams`, with every default filled in."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = None
    """Most response tokens; None: up to the model length."""
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    """Only tokens that may be sampled; empty: all."""
    json_schema: str = ""
    """JSON schema of the response; empty: any response."""
    top_logprobs: int = 0
    """Number of top tokens that are reported for each response position."""
    prompt_logprobs: int | None = None
    """Number of top tokens for each prompt position, in addition to the prompt's own tokens; None: none at all."""
    ignore_eos: bool = False
    processed_logprobs: bool = False
    """Report log-probabilities of the distribution sampled from instead of the model's own."""
    unknown_logprobs_mode: int = 0
    """Number of a mode that this version does not know, which `check_sampling` refuses; else 0."""

    def stops(self, limits: ModelLimits) -> set[int]:
        """Return the tokens that end a sample."""
        return {*self.stop_token_ids, *(() if self.ignore_eos else limits.end_tokens)}


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of a model: ids in [0, vocab_size), prompt and response of at most max_model_len tokens.

    `has_text`: a tokenizer gives the text of its tokens. `end_tokens` end a sequence.
    """

    vocab_size: int
    max_model_len: int
    has_text: bool = False
    end_tokens: tuple[int, ...] = ()
    max_message_bytes: int = MAX_MESSAGE_BYTES
    """Most bytes of a message, of which a whole sample is one."""


def resolve(params: sample_pb2.SamplingParams | None) -> Sampling:
    """Return `params` with the documented default for every unset field, unchecked."""
    if params is None:
        return Sampling()
    given = {name: getattr(params, name) for name in _OPTIONAL if params.HasField(name)}
    mode = int(params.logprobs_mode)
    return Sampling(
        **given,
        stop_token_ids=tuple(params.stop_token_ids),
        stop=tuple(params.stop),
        allowed_token_ids=tuple(params.allowed_token_ids),
        json_schema=params.json_schema,
        top_logprobs=params.top_logprobs,
        ignore_eos=params.ignore_eos,
        processed_logprobs=mode == sample_pb2.LOGPROBS_MODE_PROCESSED,
        unknown_logprobs_mode=0 if mode in sample_pb2.LogprobsMode.values() else mode,
    )


def check_sampling(sampling: Sampling, limits: ModelLimits, field: str) -> list[Violation]:
    """Return violations of the ranges of `paceline.v1.SamplingParams`; `field` is the path of the parameters."""
    found = [
        Violation(_join(field, name), f"{getattr(sampling, name)} is not allowed; must be {bounds}")
        for name, bounds in RANGES.items()
        if not bounds.has(getattr(sampling, name))
    ]
    found += _check_counts(sampling, limits, field)
    found += check_tokens(sampling.stop_token_ids, limits, _join(field, "stop_token_ids"), allow_empty=True)
    found += _check_allowed(sampling, limits, _join(field, "allowed_token_ids"))
    most = min(MOST_TOP_LOGPROBS, limits.vocab_size)
    found += [
        Violation(_join(field, name), f"{getattr(sampling, name)} is not allowed; must be in [0, {most}]")
        for name in ("top_logprobs", "prompt_logprobs")
        if not 0 <= (getattr(sampling, name) or 0) <= most
    ]
    if sampling.json_schema:
        found += _check_schema(sampling, limits, field)
    found += _check_stop(sampling.stop, limits, _join(field, "stop"))
    if sampling.unknown_logprobs_mode:
        allowed = ", ".join(sample_pb2.LogprobsMode.keys())
        description = f"{sampling.unknown_logprobs_mode} is not known; must be one of {allowed}"
        found.append(Violation(_join(field, "logprobs_mode"), description))
    return found


def check_tokens(
    ids: Sequence[int], limits: ModelLimits, field: str, allow_empty: bool = False
) -> list[Violation]:
    """Return violations of token ids: an empty list (unless `allow_empty`), or ids outside [0, vocab_size)."""
    if not ids:
        return [] if allow_empty else [Violation(field, "is empty; at least one token is needed")]
    if min(ids) >= 0 and max(ids) < limits.vocab_size:
        return []
    wrong = [index for index, token in enumerate(ids) if not 0 <= token < limits.vocab_size]
    allowed = f"must be in [0, {limits.vocab_size}), the model's vocabulary"
    found = [Violation(f"{field}[{index}]", f"{ids[index]} {allowed}") for index in wrong[:MAX_REPORTED]]
    if len(wrong) > MAX_REPORTED:
        found.append(Violation(field, f"{len(wrong)} of {len(ids)} token ids {allowed}"))
    return found


def check_lengths(
    prompt_len: int, prefix_len: int, sampling: Sampling, limits: ModelLimits, field: str
) -> list[Violation]:
    """Return violations of lengths in tokens: one more token must fit, and `min_tokens` in all."""
    found = []
    room = limits.max_model_len - prompt_len
    if room - prefix_len < 1:
        parts = f"{prompt_len} prompt" + (f" and {prefix_len} prefix" if prefix_len else "")
        allowed = f"the model takes {limits.max_model_len} in all"
        found.append(Violation(field, f"{parts} tokens leave no room to generate; {allowed}"))
    if sampling.max_tokens is not None and 0 < sampling.max_tokens <= prefix_len:
        description = f"{prefix_len} prefix tokens; must be fewer than max_tokens, {sampling.max_tokens}"
        found.append(Violation(field, description))
    if sampling.min_tokens > room >= 1:
        description = f"min_tokens is {sampling.min_tokens}; after {prompt_len} prompt tokens the model has"
        found.append(Violation(field, f"{description} room for {room}"))
    return found


def _check_counts(sampling: Sampling, limits: ModelLimits, field: str) -> list[Violation]:
    found = []
    most = limits.max_model_len
    if sampling.max_tokens is not None and not 1 <= sampling.max_tokens <= most:
        description = f"{sampling.max_tokens} is not allowed; must be in [1, {most}], the model's length"
        found.append(Violation(_join(field, "max_tokens"), description))
    if sampling.min_tokens < 0:
        description = f"{sampling.min_tokens} is not allowed; must be >= 0"
        found.append(Violation(_join(field, "min_tokens"), description))
    if sampling.min_tokens > 0 and len(sampling.stops(limits)) >= limits.vocab_size:
        description = (
            f"{sampling.min_tokens} is not allowed: every token is a stop token, and none may come first"
        )
        found.append(Violation(_join(field, "min_tokens"), description))
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens >= 1:
        description = f"{sampling.min_tokens} is more than max_tokens, {sampling.max_tokens}"
        found.append(Violation(_join(field, "min_tokens"), description))
    return found


def _check_allowed(sampling: Sampling, limits: ModelLimits, field: str) -> list[Violation]:
    allowed = sampling.allowed_token_ids
    if len(allowed) > MOST_ALLOWED:
        return [Violation(field, f"has {len(allowed)} token ids; at most {MOST_ALLOWED}")]
    if allowed and sampling.min_tokens > 0 and sampling.stops(limits).issuperset(allowed):
        return [Violation(field, "has nothing but stop tokens, which min_tokens forbids at first")]
    return check_tokens(allowed, limits, field, allow_empty=True)


def _check_schema(sampling: Sampling, limits: ModelLimits, path: str) -> list[Violation]:
    field, found = _join(path, "json_schema"), []
    if not limits.has_text:
        found.append(
            Violation(field, "is set, and the model has no tokenizer that tells the text of its tokens")
        )
    found += [Violation(field, fault) for fault in schema_faults(sampling.json_schema)]
    if sampling.allowed_token_ids:
        found.append(Violation(_join(path, "allowed_token_ids"), "is not allowed together with json_schema"))
    if sampling.min_tokens > 0:
        found.append(Violation(_join(path, "min_tokens"), "is not allowed together with json_schema"))
    if sampling.ignore_eos and not sampling.stop_token_ids:
        ends = "is not allowed together with json_schema: nothing would end the sample"
        found.append(Violation(_join(path, "ignore_eos"), ends))
    return found


def _check_stop(stop: Sequence[str], limits: ModelLimits, field: str) -> list[Violation]:
    if stop and not limits.has_text:
        return [Violation(field, "is set, and the model has no tokenizer that tells the text of its tokens")]
    if len(stop) > MOST_STOP_STRINGS:
        return [Violation(field, f"has {len(stop)} strings; at most {MOST_STOP_STRINGS}")]
    return [
        Violation(f"{field}[{index}]", f"has {length} bytes; must be 1 to {LONGEST_STOP_STRING}")
        for index, length in enumerate(len(each.encode()) for each in stop)
        if not 1 <= length <= LONGEST_STOP_STRING
    ]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


_OPTIONAL = tuple(
    name for name, field in sample_pb2.SamplingParams.DESCRIPTOR.fields_by_name.items() if field.has_presence
)
