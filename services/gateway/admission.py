"""What is wrong with a request, field by field. Pure."""

import re

from paceline.v1 import rollout_pb2, sample_pb2
from services.platform.errors import Unimplemented
from services.platform.sampling import ModelLimits, check_lengths, check_sampling, check_tokens, resolve
from services.platform.violations import Violation

_BATCH_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_RUN_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# Names of prompts become part of seeds, logs and history: long ones are a mistake.
_LONGEST_PROMPT_ID = 256
# More violations than anybody reads; checking goes no further.
_ENOUGH = 64
_UNKNOWN_LEVEL = "is not an exactness level; allowed are EXACT and COUPLED_HISTORY"


def check_names(run_id: str, batch_id: str) -> list[Violation]:
    """Violations of the names of a run and a batch."""
    violations = []
    if not _RUN_ID.fullmatch(run_id):
        violations.append(Violation("run_id", f"is {run_id[:140]!r}; must be 1 to 128 of A-Z a-z 0-9 . _ -"))
    if not _BATCH_ID.fullmatch(batch_id):
        violations.append(
            Violation("batch_id", f"is {batch_id[:140]!r}; must be 1 to 128 of A-Z a-z 0-9 . _ : -")
        )
    return violations


def check_submit(request: rollout_pb2.SubmitRolloutsRequest, limits: ModelLimits) -> list[Violation]:
    """Violations of a batch of groups. Unimplemented for an exactness level that is not there yet."""
    violations = check_names(request.run_id, request.batch_id)
    violations += check_exactness(request.exactness)
    violations += check_sampling(resolve(request.sampling), limits, "sampling")
    if request.HasField("deadline") and request.deadline.ToTimedelta().total_seconds() <= 0:
        violations.append(Violation("deadline", "must be above 0; leave it unset for the gateway's limit"))
    if not request.groups:
        violations.append(Violation("groups", "is empty; a batch has at least one group"))
    seen: dict[str, int] = {}
    for number, group in enumerate(request.groups):
        violations += _check_group(request, number, limits)
        first = seen.setdefault(group.prompt_id, number)
        if first != number:
            violations.append(
                Violation(
                    f"groups[{number}].prompt_id",
                    f"is {group.prompt_id!r}, as groups[{first}]; prompt ids are unique in a batch",
                )
            )
        if len(violations) >= _ENOUGH:
            break
    return violations


def check_generate(request: rollout_pb2.GenerateRequest, limits: ModelLimits) -> list[Violation]:
    """Violations of a request for one sample."""
    sampling = resolve(request.sampling)
    prompt, prefix = request.prompt_token_ids, request.prefix_token_ids
    return [
        *check_exactness(request.exactness),
        *check_sampling(sampling, limits, "sampling"),
        *check_tokens(prompt, limits, "prompt_token_ids"),
        *check_tokens(prefix, limits, "prefix_token_ids", allow_empty=True),
        *check_lengths(len(prompt), len(prefix), sampling, limits, "prompt_token_ids"),
    ]


def check_exactness(exactness: sample_pb2.Exactness) -> list[Violation]:
    """Violations of an exactness level; Unimplemented for one that is not there yet."""
    level = exactness.level
    if level == sample_pb2.EXACTNESS_LEVEL_LENIENT:
        name = sample_pb2.ExactnessLevel.Name(level)
        allowed = "EXACT, COUPLED_HISTORY or REJECTION"
        raise Unimplemented(name, f"exactness level {name} is not there yet; use {allowed}")
    violations = []
    if level not in sample_pb2.ExactnessLevel.values():
        violations.append(Violation("exactness.level", f"{level} {_UNKNOWN_LEVEL}"))
    if exactness.HasField("lenience"):
        violations.append(Violation("exactness.lenience", "is set; it belongs to level LENIENT only"))
    return violations


def _check_group(
    request: rollout_pb2.SubmitRolloutsRequest, number: int, limits: ModelLimits
) -> list[Violation]:
    group, field = request.groups[number], f"groups[{number}]"
    violations = []
    if not 1 <= len(group.prompt_id) <= _LONGEST_PROMPT_ID:
        violations.append(
            Violation(
                f"{field}.prompt_id",
                f"has {len(group.prompt_id)} characters; allowed are 1 to {_LONGEST_PROMPT_ID}",
            )
        )
    if group.samples < 1:
        violations.append(Violation(f"{field}.samples", f"is {group.samples}; must be at least 1"))
    own = group.HasField("sampling")
    sampling = resolve(group.sampling if own else request.sampling)
    if own:
        violations += check_sampling(sampling, limits, f"{field}.sampling")
    violations += check_tokens(group.prompt_token_ids, limits, f"{field}.prompt_token_ids")
    violations += check_lengths(len(group.prompt_token_ids), 0, sampling, limits, f"{field}.prompt_token_ids")
    return violations
