"""Whether a work item can be taken. vLLM does not check token ids itself when it has no tokenizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import dataclass, replace

from google.rpc import code_pb2

from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import sample_pb2
from services.generation.engine.types import SampleRequest, Verifier
from services.generation.rollouts.cache import DraftCache
from services.generation.rollouts.lenient import reusable
from services.generation.rollouts.origin import Origin
from services.platform.errors import (
    FailedPrecondition,
    InvalidArgument,
    ServiceError,
    Unimplemented,
)
from services.platform.sampling import (
    ModelLimits,
    Sampling,
    check_lengths,
    check_sampling,
    check_tokens,
    resolve,
)
from services.platform.violations import Violation

_VERIFIERS = {
    sample_pb2.EXACTNESS_LEVEL_UNSPECIFIED: Verifier.COUPLED,
    sample_pb2.EXACTNESS_LEVEL_EXACT: Verifier.COUPLED,
    sample_pb2.EXACTNESS_LEVEL_COUPLED_HISTORY: Verifier.COUPLED,
    sample_pb2.EXACTNESS_LEVEL_REJECTION: Verifier.REJECTION,
    sample_pb2.EXACTNESS_LEVEL_LENIENT: Verifier.LENIENT,
}


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms an instance takes samples right now."""

    policy_version: int
    limits: ModelLimits
    # Empty, or why nothing is taken.
    closed: str = ""


class Refusal:
    """Turns a typed error into the refusal of an item."""

    @staticmethod
    def of(handle: int, error: ServiceError) -> pb.Refused:
        """The protocol's form of an error."""
        field = ""
        if isinstance(error, InvalidArgument) and error.violations:
            field = error.violations[0].field
        code: int = error.code.value[0]
        return pb.Refused(handle=handle, code=code, message=error.message, field=field)

    @staticmethod
    def unexpected(handle: int, error: Exception) -> pb.Refused:
        """The refusal of an item that passed every check and that the engine would not take all the same."""
        return pb.Refused(handle=handle, code=code_pb2.INTERNAL, message=f"the engine refused it: {error!r}")


def check_item(
    item: pb.WorkItem,
    terms: Terms,
    taken: Container[int],
    next_id: Callable[[], str],
    cache: DraftCache | None = None,
) -> SampleRequest:
    """The engine's form of an item; a LENIENT one takes over its rollout in the cache, if it may and there is one.

    Raises:
        FailedPrecondition: another policy version, or the instance takes nothing.
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
        raise Unimplemented(name, f"exactness level {name} is not served")
    sampling = resolve(item.sampling)
    prompt, prefix = item.prompt_token_ids, item.prefix_token_ids
    violations = [
        *check_tokens(prompt, terms.limits, "prompt_token_ids"),
        *check_tokens(prefix, terms.limits, "prefix_token_ids", allow_empty=True),
        *check_tokens(item.given_draft, terms.limits, "given_draft", allow_empty=True),
        *check_sampling(sampling, terms.limits, "sampling"),
        *_check_lengths(len(prompt), len(prefix), sampling, terms.limits),
        *(_check_lenience(item.exactness) if verifier is Verifier.LENIENT else ()),
    ]
    if item.handle in taken:
        violations.append(Violation("handle", f"{item.handle} names a sample that is still running"))
    if violations:
        raise InvalidArgument(violations)
    request = SampleRequest(
        next_id(),
        tuple(prompt),
        tuple(prefix),
        sampling,
        item.seed,
        tuple(item.given_draft),
        item.prompt_id,
        verifier,
    )
    return request if verifier is not Verifier.LENIENT else _lenient(request, item, cache)


def _lenient(request: SampleRequest, item: pb.WorkItem, cache: DraftCache | None) -> SampleRequest:
    """The request with its lenience, and with the cached rollout that it takes over."""
    exactness, lenience = item.exactness, _lenience(item.exactness)
    # A sample that is gone on with takes nothing over any more.
    if cache is None or request.prefix:
        return replace(request, lenience=lenience)
    floor = exactness.diversity_floor if exactness.HasField("diversity_floor") else None
    rollout = reusable(cache, Origin.of(item), item.seed, exactness.reuse_delay, floor)
    if rollout is None:
        return replace(request, lenience=lenience)
    return replace(
        request,
        lenience=lenience,
        cached=tuple(rollout.tokens.tolist()),
        cached_logprobs=tuple(rollout.logprobs.tolist()),
    )


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
    """As `check_lengths`, but a prefix that is the whole response is allowed: its sample finishes at once."""
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
