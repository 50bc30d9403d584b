"""What is wrong with a request, field by field. Pure."""

import math
import re

from paceline.v1 import rollout_pb2, sample_pb2
from services.drafts.lenience import CEILING, FLOOR
from services.platform.sampling import ModelLimits, check_lengths, check_sampling, check_tokens, resolve
from services.platform.violations import Violation

_BATCH_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_RUN_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# Names of prompts become part of seeds, logs and history: long ones are a mistake.
_LONGEST_PROMPT_ID = 256
# More violations than anybody reads; checking goes no further.
_ENOUGH = 64
_UNKNOWN_LEVEL = "is not an exactness level; allowed are EXACT, COUPLED_HISTORY, LENIENT and REJECTION"
# Fields of Exactness that only LENIENT has.
_LENIENT_FIELDS = ("lenience", "kl_target", "diversity_floor")


def check_names(run_id: str, batch_id: str) -> list[Violation]:
    """Violations of the names of a run and a batch."""
    violations = _check_run(run_id)
    if not _BATCH_ID.fullmatch(batch_id):
        violations.append(
            Violation("batch_id", f"is {batch_id[:140]!r}; must be 1 to 128 of A-Z a-z 0-9 . _ : -")
        )
    return violations


def check_submit(request: rollout_pb2.SubmitRolloutsRequest, limits: ModelLimits) -> list[Violation]:
    """Violations of a batch of groups."""
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
    names = []
    if request.exactness.level == sample_pb2.EXACTNESS_LEVEL_LENIENT:
        # It asks for what is cached under these names.
        names = _check_run(request.run_id) + _check_prompt(request.prompt_id, "prompt_id")
    return [
        *names,
        *check_exactness(request.exactness),
        *check_sampling(sampling, limits, "sampling"),
        *check_tokens(prompt, limits, "prompt_token_ids"),
        *check_tokens(prefix, limits, "prefix_token_ids", allow_empty=True),
        *check_lengths(len(prompt), len(prefix), sampling, limits, "prompt_token_ids"),
    ]


def check_exactness(exactness: sample_pb2.Exactness) -> list[Violation]:
    """Violations of an exactness level and what belongs to it."""
    if exactness.level == sample_pb2.EXACTNESS_LEVEL_LENIENT:
        return _check_lenient(exactness)
    violations = []
    if exactness.level not in sample_pb2.ExactnessLevel.values():
        violations.append(Violation("exactness.level", f"{exactness.level} {_UNKNOWN_LEVEL}"))
    given = [name for name in _LENIENT_FIELDS if exactness.HasField(name)]
    if exactness.reuse_delay:
        given.append("reuse_delay")
    violations += [
        Violation(f"exactness.{name}", "is set; it belongs to level LENIENT only") for name in given
    ]
    return violations


def check_report(request: rollout_pb2.ReportRewardsRequest) -> list[Violation]:
    """Violations of what is reported of a batch."""
    violations = check_names(request.run_id, request.batch_id)
    if request.HasField("kl") and not 0 <= request.kl < math.inf:
        violations.append(Violation("kl", f"is {request.kl}; must be finite and >= 0"))
    if request.HasField("clip_fraction") and not 0 <= request.clip_fraction <= 1:
        violations.append(Violation("clip_fraction", f"is {request.clip_fraction}; must be in [0, 1]"))
    seen: dict[tuple[str, int], int] = {}
    for number, reward in enumerate(request.rewards):
        if not math.isfinite(reward.reward):
            violations.append(Violation(f"rewards[{number}].reward", f"is {reward.reward}; must be finite"))
        first = seen.setdefault((reward.prompt_id, reward.slot), number)
        if first != number:
            name = f"prompt {reward.prompt_id!r} slot {reward.slot}"
            violations.append(
                Violation(f"rewards[{number}]", f"is of {name}, as rewards[{first}]; a sample has one")
            )
        if len(violations) >= _ENOUGH:
            break
    return violations


def _check_lenient(exactness: sample_pb2.Exactness) -> list[Violation]:
    violations = []
    adaptive = exactness.HasField("kl_target")
    if exactness.HasField("lenience"):
        lenience = exactness.lenience
        if not FLOOR <= lenience < math.inf:
            violations.append(Violation("exactness.lenience", f"is {lenience}; must be finite and >= 1"))
        elif adaptive and lenience > CEILING:
            allowed = f"with a kl_target it must be at most {CEILING:.6g}, as far as l is moved"
            violations.append(Violation("exactness.lenience", f"is {lenience}; {allowed}"))
    elif not adaptive:
        needed = "is missing; LENIENT needs the l of its rule, finite and >= 1, or a kl_target"
        violations.append(Violation("exactness.lenience", needed))
    if adaptive and not 0 < exactness.kl_target < math.inf:
        violations.append(
            Violation("exactness.kl_target", f"is {exactness.kl_target}; must be finite and > 0")
        )
    if exactness.HasField("diversity_floor") and not 0 < exactness.diversity_floor <= 1:
        violations.append(
            Violation("exactness.diversity_floor", f"is {exactness.diversity_floor}; must be in (0, 1]")
        )
    return violations


def _check_run(run_id: str) -> list[Violation]:
    if _RUN_ID.fullmatch(run_id):
        return []
    return [Violation("run_id", f"is {run_id[:140]!r}; must be 1 to 128 of A-Z a-z 0-9 . _ -")]


def _check_prompt(prompt_id: str, field: str) -> list[Violation]:
    if 1 <= len(prompt_id) <= _LONGEST_PROMPT_ID:
        return []
    allowed = f"allowed are 1 to {_LONGEST_PROMPT_ID}"
    return [Violation(field, f"has {len(prompt_id)} characters; {allowed}")]


def _check_group(
    request: rollout_pb2.SubmitRolloutsRequest, number: int, limits: ModelLimits
) -> list[Violation]:
    group, field = request.groups[number], f"groups[{number}]"
    violations = _check_prompt(group.prompt_id, f"{field}.prompt_id")
    if group.samples < 1:
        violations.append(Violation(f"{field}.samples", f"is {group.samples}; must be at least 1"))
    own = group.HasField("sampling")
    sampling = resolve(group.sampling if own else request.sampling)
    if own:
        violations += check_sampling(sampling, limits, f"{field}.sampling")
    violations += check_tokens(group.prompt_token_ids, limits, f"{field}.prompt_token_ids")
    violations += check_lengths(len(group.prompt_token_ids), 0, sampling, limits, f"{field}.prompt_token_ids")
    return violations
