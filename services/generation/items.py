"""Whether a work item can be taken. vLLM does not check token ids itself when it has no tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from google.rpc import code_pb2

from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import sample_pb2
from services.generation.engine.types import SampleRequest, Verifier
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

_SERVED = {
    sample_pb2.EXACTNESS_LEVEL_UNSPECIFIED,
    sample_pb2.EXACTNESS_LEVEL_EXACT,
    sample_pb2.EXACTNESS_LEVEL_COUPLED_HISTORY,
    sample_pb2.EXACTNESS_LEVEL_REJECTION,
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
    item: pb.WorkItem, terms: Terms, taken: Container[int], next_id: Callable[[], str]
) -> SampleRequest:
    """The engine's form of an item.

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
    if item.exactness.level not in _SERVED:
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
    ]
    if item.handle in taken:
        violations.append(Violation("handle", f"{item.handle} names a sample that is still running"))
    if violations:
        raise InvalidArgument(violations)
    rejection = item.exactness.level == sample_pb2.EXACTNESS_LEVEL_REJECTION
    return SampleRequest(
        next_id(),
        tuple(prompt),
        tuple(prefix),
        sampling,
        item.seed,
        tuple(item.given_draft),
        item.prompt_id,
        Verifier.REJECTION if rejection else Verifier.COUPLED,
    )


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
