"""Admission of work items: their checks, and their form as requests of the engine.

vLLM does not check token ids itself when it has no tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from google.rpc import code_pb2

from paceline.errors import Violation
from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import sample_pb2
from services.contracts.errors import FailedPrecondition, InvalidArgument, ServiceError, Unimplemented
from services.contracts.sampling import (
    ModelLimits,
    Sampling,
    check_lengths,
    check_sampling,
    check_tokens,
    resolve,
)
from services.generation.draft_cache.cache import DraftCache, reusable
from services.generation.draft_cache.origin import Origin
from services.generation.engine.types import EngineRequest, Verifier

_VERIFIERS = {
    sample_pb2.EXACTNESS_LEVEL_UNSPECIFIED: Verifier.COUPLED,
    sample_pb2.EXACTNESS_LEVEL_EXACT: Verifier.COUPLED,
    sample_pb2.EXACTNESS_LEVEL_COUPLED_HISTORY: Verifier.COUPLED,
    sample_pb2.EXACTNESS_LEVEL_REJECTION: Verifier.REJECTION,
    sample_pb2.EXACTNESS_LEVEL_LENIENT: Verifier.LENIENT,
}

# Number of sets of sampling parameters that are remembered: the samples of a step mostly share one.
_REMEMBERED = 16


@dataclass(frozen=True, slots=True)
class AdmissionTerms:
    """Terms on which an instance takes samples now; `closed` says why it takes none, and is else empty."""

    policy_version: int
    limits: ModelLimits
    closed: str = ""
    lenient_drafts: bool = False
    """True if LENIENT samples take over no cached rollout, and have their drafts verified by the lenient rule."""


def refusal(handle: int, error: Exception) -> pb.Refused:
    """Return the refusal of an item for an error; INTERNAL for one that the engine raised after every check."""
    if not isinstance(error, ServiceError):
        return pb.Refused(handle=handle, code=code_pb2.INTERNAL, message=f"the engine refused it: {error!r}")
    violations = error.violations if isinstance(error, InvalidArgument) else ()
    field = violations[0].field if violations else ""
    message = violations[0].description if len(violations) == 1 else error.message
    reason = error.reason if isinstance(error, FailedPrecondition) else ""
    return pb.Refused(handle=handle, code=error.code.value[0], message=message, field=field, reason=reason)


def check_item(
    item: pb.WorkItem,
    terms: AdmissionTerms,
    taken: Container[int],
    next_id: Callable[[], str],
    cache: DraftCache | None = None,
) -> EngineRequest:
    """Return an item as a request of the engine.

    A LENIENT item takes over its cached rollout if it may, or has its drafts verified by recorded
    log-probabilities.

    Raises:
        FailedPrecondition: another policy version, or the instance takes no samples.
        InvalidArgument: fields that cannot be generated from; each is named with what is allowed.
        Unimplemented: an exactness level that is not served.
    """
    if terms.closed:
        raise FailedPrecondition("INSTANCE_CLOSED", f"this instance takes no samples: {terms.closed}")
    if item.policy_version != terms.policy_version:
        raise FailedPrecondition(
            "STALE_VERSION",
            f"the sample asks for policy version {item.policy_version}, served is {terms.policy_version}",
            requested=str(item.policy_version),
            current=str(terms.policy_version),
        )
    verifier = _VERIFIERS.get(item.exactness.level)
    if verifier is None:
        name = _level_name(item.exactness.level)
        raise Unimplemented(name, f"exactness level {name} is not served by this instance")
    sampling, faults = _resolved(item.sampling.SerializeToString(), terms.limits)
    if violations := _violations(item, sampling, faults, verifier, terms.limits, taken):
        raise InvalidArgument(violations)
    request = EngineRequest(
        next_id(),
        tuple(item.prompt_token_ids),
        tuple(item.prefix_token_ids),
        sampling,
        item.seed,
        tuple(item.reference_token_ids),
        item.prompt_id,
        verifier,
        environment_last=item.environment_last,
    )
    if verifier is not Verifier.LENIENT:
        return request
    request = replace(request, lenience=_lenience(item.exactness))
    return _by_drafts(request, item, cache) if terms.lenient_drafts else _lenient(request, item, cache)


@lru_cache(_REMEMBERED)
def _resolved(parameters: bytes, limits: ModelLimits) -> tuple[Sampling, Sequence[Violation]]:
    """Return serialised sampling parameters with their defaults, and their violations."""
    sampling = resolve(sample_pb2.SamplingParams.FromString(parameters))
    return sampling, tuple(check_sampling(sampling, limits, "sampling"))


def _violations(
    item: pb.WorkItem,
    sampling: Sampling,
    faults: Sequence[Violation],
    verifier: Verifier,
    limits: ModelLimits,
    taken: Container[int],
) -> list[Violation]:
    prompt, prefix = item.prompt_token_ids, item.prefix_token_ids
    violations = [
        *check_tokens(prompt, limits, "prompt_token_ids"),
        *check_tokens(prefix, limits, "prefix_token_ids", allow_empty=True),
        *check_tokens(item.reference_token_ids, limits, "reference_token_ids", allow_empty=True),
        *faults,
        *_check_lengths(len(prompt), len(prefix), sampling, limits),
        *(_check_lenience(item.exactness) if verifier is Verifier.LENIENT else ()),
    ]
    if item.handle in taken:
        violations.append(Violation("handle", f"{item.handle} names a sample that is still running"))
    return violations


def _lenient(request: EngineRequest, item: pb.WorkItem, cache: DraftCache | None) -> EngineRequest:
    """Return a request with the cached rollout that it takes over."""
    exactness = item.exactness
    # A resumed sample takes over no rollout any more.
    if cache is None or request.prefix:
        return request
    floor = exactness.diversity_floor if exactness.HasField("diversity_floor") else None
    rollout = reusable(cache, Origin.of(item), item.seed, exactness.reuse_delay, floor)
    if rollout is None:
        return request
    return replace(
        request, cached=tuple(rollout.tokens.tolist()), cached_logprobs=tuple(rollout.logprobs.tolist())
    )


def _by_drafts(request: EngineRequest, item: pb.WorkItem, cache: DraftCache | None) -> EngineRequest:
    """Return a request whose drafts are verified by the recorded pre-generated rollouts of its prompt."""
    recorded = None if cache is None else cache.recorded(Origin.of(item), request.prompt)
    return replace(request, verifier=Verifier.REJECTION, recorded=recorded)


def _lenience(exactness: sample_pb2.Exactness) -> float:
    return exactness.lenience if exactness.HasField("lenience") else 1.0


def _check_lenience(exactness: sample_pb2.Exactness) -> list[Violation]:
    found = []
    lenience = _lenience(exactness)
    # Written to be false for NaN.
    if not 1 <= lenience < math.inf:
        found.append(Violation("exactness.lenience", f"{lenience} is not allowed; must be finite and >= 1"))
    if exactness.HasField("diversity_floor") and not 0 < exactness.diversity_floor <= 1:
        description = f"{exactness.diversity_floor} is not allowed; must be in (0, 1]"
        found.append(Violation("exactness.diversity_floor", description))
    return found


def _check_lengths(prompt: int, prefix: int, sampling: Sampling, limits: ModelLimits) -> list[Violation]:
    """Check lengths; a prefix that is the whole response is allowed: its sample finishes at once."""
    room = limits.max_model_len - prompt
    longest = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
    if 0 < prefix == longest:
        return []
    return check_lengths(prompt, prefix, sampling, limits, "prompt_token_ids")


def _level_name(level: int) -> str:
    # A newer caller may know levels that have no name here.
    return (
        sample_pb2.ExactnessLevel.Name(level) if level in sample_pb2.ExactnessLevel.values() else str(level)
    )
