"""Check requests field by field, and find the first difference between two requests under one name. Pure.

Each check returns its violations, so that a caller learns all mistakes at once.
"""

from __future__ import annotations

import math
import re
import reprlib
import sys
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

from paceline.columns import message_bytes
from paceline.errors import Violation
from paceline.times import seconds_of
from paceline.v1 import fleet_pb2, rollout_pb2, sample_pb2
from services.contracts.sampling import (
    ModelLimits,
    Sampling,
    check_lengths,
    check_sampling,
    check_tokens,
    resolve,
)
from services.gateway.state.calls import with_calls
from services.gateway.state.lenience import CEILING, FLOOR

_TOOL_FIELDS = {"tools.stop_token_ids": "tools.call_token_ids", "tools.stop": "tools.call_strings"}
_BATCH_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_RUN_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# Names of prompts become part of seeds, logs and history: long ones are a mistake.
_LONGEST_PROMPT_ID = 256
# One of `_SHARES` equal parts of a message is left for the other fields of its sample.
_SHARES = 64
ENOUGH = 64
"""Number of violations after which a check stops: a reader needs no more."""
_UNKNOWN_LEVEL = "is not an exactness level; allowed are EXACT, COUPLED_HISTORY, LENIENT and REJECTION"
# Fields of Exactness that only LENIENT has.
_LENIENT_FIELDS = ("lenience", "kl_target", "diversity_floor")
# Range of a Timestamp, in seconds since the Unix epoch.
_YEAR_1, _YEAR_10000 = -62_135_596_800, 253_402_300_800
_UNSET = "unset"


def check_submit(
    request: rollout_pb2.SubmitRolloutsRequest,
    limits: ModelLimits,
    *,
    opens: bool = False,
    most_calls: int = sys.maxsize,
) -> list[Violation]:
    """Return the violations in a batch. With `opens`, its groups are not checked: it has none yet.

    A batch may allow its samples at most `most_calls` tool calls.
    """
    violations = check_names(request.run_id, request.batch_id)
    violations += check_exactness(request.exactness)
    tools = check_tools(request, limits, most_calls) if request.HasField("tools") else []
    sampling = request.sampling if tools else with_calls(request.sampling, request.tools)
    violations += [*check_sampling(resolve(sampling), limits, "sampling"), *tools]
    in_time = not request.HasField("deadline") or seconds_of(request.deadline) > 0
    violations += _unless(in_time, "deadline", "must be above 0; leave it unset for the gateway's limit")
    known = request.stale in rollout_pb2.Stale.values()
    violations += _unless(known, "stale", f"is {request.stale}; must be REFUSE or REGENERATE")
    bounded = request.HasField("max_staleness") or not request.stale
    violations += _unless(bounded, "stale", "is set; it belongs to a max_staleness")
    if opens:
        return violations
    return violations + check_groups(request.groups, request, limits)


def check_tools(
    request: rollout_pb2.SubmitRolloutsRequest, limits: ModelLimits, most_calls: int
) -> list[Violation]:
    """Return the violations in a batch's settings of tool calls, and in settings that exclude tool calls."""
    tools = request.tools
    calls = Sampling(stop_token_ids=tuple(tools.call_token_ids), stop=tuple(tools.call_strings))
    found = [_as_tool_field(violation) for violation in check_sampling(calls, limits, "tools")]
    if not (tools.call_token_ids or tools.call_strings):
        found.append(
            Violation("tools", "has neither call_token_ids nor call_strings: nothing would be a call")
        )
    if tools.max_calls > most_calls:
        fault = f"is {tools.max_calls}; must be at most {most_calls}, or 0 for that"
        found.append(Violation("tools.max_calls", fault))
    if tools.HasField("max_wait") and seconds_of(tools.max_wait) <= 0:
        found.append(Violation("tools.max_wait", "must be above 0; leave it unset for the gateway's"))
    found += check_sampling_with_tools(request.sampling, tools, "sampling")
    if request.exactness.level == sample_pb2.EXACTNESS_LEVEL_LENIENT:
        fault = "is LENIENT, which excludes tools: a cached rollout has the answers of another environment"
        found.append(Violation("exactness.level", fault))
    if request.stale == rollout_pb2.STALE_REGENERATE:
        fault = "is REGENERATE, which excludes tools: an environment cannot be reset; REFUSE ends samples"
        found.append(Violation("stale", fault))
    return found


def check_sampling_with_tools(
    sampling: sample_pb2.SamplingParams, tools: sample_pb2.ToolUse, field: str
) -> list[Violation]:
    """Return the violations in sampling parameters of samples that call tools."""
    found = []
    if sampling.json_schema:
        fault = "is set, which excludes tools: the schema would have to describe their answers, too"
        found.append(Violation(f"{field}.json_schema", fault))
    for name, ends, calls in (
        ("stop_token_ids", sampling.stop_token_ids, tools.call_token_ids),
        ("stop", sampling.stop, tools.call_strings),
    ):
        if both := sorted({*map(repr, ends)} & {*map(repr, calls)}):
            found.append(
                Violation(f"{field}.{name}", f"has {both[0]}, which is a tool call and ends nothing")
            )
    return found


def _as_tool_field(violation: Violation) -> Violation:
    for name, own in _TOOL_FIELDS.items():
        if violation.field == name or violation.field.startswith(f"{name}["):
            return Violation(own + violation.field[len(name) :], violation.description)
    return violation


def check_names(run_id: str, batch_id: str) -> list[Violation]:
    """Return the violations in the names of a run and a batch."""
    allowed = f"is {batch_id[:140]!r}; must be 1 to 128 of A-Z a-z 0-9 . _ : -"
    return check_run(run_id) + _unless(bool(_BATCH_ID.fullmatch(batch_id)), "batch_id", allowed)


def as_submission(request: rollout_pb2.OpenBatchRequest) -> rollout_pb2.SubmitRolloutsRequest:
    """Return the batch that is opened, still without groups."""
    return rollout_pb2.SubmitRolloutsRequest(
        run_id=request.run_id,
        batch_id=request.batch_id,
        step=request.step,
        policy_version=request.policy_version,
        sampling=request.sampling,
        exactness=request.exactness,
        run_seed=request.run_seed,
        deadline=request.deadline if request.HasField("deadline") else None,
        priority=request.priority,
        weight=request.weight,
        max_staleness=request.max_staleness if request.HasField("max_staleness") else None,
        stale=request.stale,
        tools=request.tools if request.HasField("tools") else None,
    )


def check_groups(
    groups: Sequence[rollout_pb2.Group], batch: rollout_pb2.SubmitRolloutsRequest, limits: ModelLimits
) -> list[Violation]:
    """Return the violations in groups of a batch, whose parameters apply to groups without any."""
    violations = _unless(bool(groups), "groups", "is empty; a batch has at least one group")
    seen: dict[str, int] = {}
    for number, group in enumerate(groups):
        # A fault of the batch's parameters may show in each of its groups.
        known = {each.field for each in violations}
        fresh = _check_group(group, batch, f"groups[{number}]", limits)
        violations += [each for each in fresh if each.field not in known]
        first = seen.setdefault(group.prompt_id, number)
        found = f"is {group.prompt_id!r}, as groups[{first}]; prompt ids are unique in a batch"
        violations += _unless(first == number, f"groups[{number}].prompt_id", found)
        if len(violations) >= ENOUGH:
            break
    return violations


def check_generate(request: rollout_pb2.GenerateRequest, limits: ModelLimits) -> list[Violation]:
    """Return the violations in a request for one sample."""
    sampling = resolve(request.sampling)
    prompt, prefix = request.prompt_token_ids, request.prefix_token_ids
    # Rollouts are cached under these names. LENIENT needs them; for other levels they are optional.
    lenient, names = request.exactness.level == sample_pb2.EXACTNESS_LEVEL_LENIENT, list[Violation]()
    if lenient or request.run_id:
        names += check_run(request.run_id)
    if lenient or request.prompt_id:
        names += _check_prompt(request.prompt_id, "prompt_id")
    given = len(request.prefix_logprobs)
    counted = f"has {given} values; must have {len(prefix)}, one for each token of the prefix, or none"
    return [
        *names,
        *check_exactness(request.exactness),
        *check_sampling(sampling, limits, "sampling"),
        *check_tokens(prompt, limits, "prompt_token_ids"),
        *check_tokens(prefix, limits, "prefix_token_ids", allow_empty=True),
        *_unless(given in (0, len(prefix)), "prefix_logprobs", counted),
        *check_lengths(len(prompt), len(prefix), sampling, limits, "prompt_token_ids"),
        *check_sample_size(len(prompt), sampling, limits, "sampling"),
    ]


def check_sample_size(
    prompt_len: int, sampling: Sampling, limits: ModelLimits, field: str
) -> list[Violation]:
    """Return the violation of sampling parameters with which a whole sample could exceed a message."""
    top, of_prompt = sampling.top_logprobs, sampling.prompt_logprobs
    room = max(0, limits.max_model_len - prompt_len)
    tokens = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
    most = limits.max_message_bytes * (_SHARES - 1) // _SHARES
    prompt = 0 if of_prompt is None else message_bytes(prompt_len, of_prompt, limits.vocab_size)
    size = prompt + message_bytes(tokens, top, limits.vocab_size)
    if size <= most:
        return []
    fitting = (most - prompt) // message_bytes(1, top, limits.vocab_size)
    limit = f"could have {size} bytes, and a message has room for {most}"
    if fitting < 1:
        asked = f"is {of_prompt}: the values of {prompt_len} prompt tokens {limit}"
        return [Violation(f"{field}.prompt_logprobs", f"{asked}; request fewer, or shorten the prompt")]
    name, fault = ("top_logprobs", f"is {top}: a") if top else ("max_tokens", f"allows {tokens}: a")
    way_out = f"set max_tokens to at most {fitting}" + (", or request fewer" if top else "")
    return [Violation(f"{field}.{name}", f"{fault} sample of {tokens} tokens {limit}; {way_out}")]


def check_exactness(exactness: sample_pb2.Exactness) -> list[Violation]:
    """Return the violations in an exactness level and its settings."""
    if exactness.level == sample_pb2.EXACTNESS_LEVEL_LENIENT:
        return _check_lenient(exactness)
    known = exactness.level in sample_pb2.ExactnessLevel.values()
    violations = _unless(known, "exactness.level", f"{exactness.level} {_UNKNOWN_LEVEL}")
    given = [name for name in _LENIENT_FIELDS if exactness.HasField(name)]
    if exactness.reuse_delay:
        given.append("reuse_delay")
    only = "is set; it belongs to level LENIENT only"
    return violations + [Violation(f"exactness.{name}", only) for name in given]


def check_report(request: rollout_pb2.ReportRewardsRequest) -> list[Violation]:
    """Return the violations in the report of a batch."""
    if request.HasField("step"):
        found = f"is {request.batch_id[:140]!r}; a report on a step has none"
        violations = check_run(request.run_id) + _unless(not request.batch_id, "batch_id", found)
    else:
        violations = check_names(request.run_id, request.batch_id)
    # Absent numbers are 0, which is allowed.
    violations += _unless(0 <= request.kl < math.inf, "kl", f"is {request.kl}; must be finite and >= 0")
    clipped = request.clip_fraction
    violations += _unless(0 <= clipped <= 1, "clip_fraction", f"is {clipped}; must be in [0, 1]")
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
        if len(violations) >= ENOUGH:
            break
    return violations


def check_watch(request: fleet_pb2.WatchDecisionsRequest) -> list[Violation]:
    """Return the violations in a request for the decisions since a time."""
    seconds, nanos = request.since.seconds, request.since.nanos
    valid = _YEAR_1 <= seconds < _YEAR_10000 and 0 <= nanos < 10**9
    allowed = "must be in the years 1 to 9999, with nanos from 0 to 999999999"
    return _unless(valid, "since", f"has seconds {seconds} and nanos {nanos}; {allowed}")


def _check_lenient(exactness: sample_pb2.Exactness) -> list[Violation]:
    adaptive, target = exactness.HasField("kl_target"), exactness.kl_target
    lenience, fault = exactness.lenience, ""
    if not exactness.HasField("lenience"):
        if not adaptive:
            fault = "is missing; LENIENT needs the l of its rule, finite and >= 1, or a kl_target"
    elif not FLOOR <= lenience < math.inf:
        fault = f"is {lenience}; must be finite and >= 1"
    elif adaptive and lenience > CEILING:
        fault = (
            f"is {lenience}; with a kl_target it must be at most {CEILING:.6g}, the most that l is moved to"
        )
    floor, diverse = exactness.diversity_floor, exactness.HasField("diversity_floor")
    return [
        *_unless(not fault, "exactness.lenience", fault),
        *_unless(
            not adaptive or 0 < target < math.inf,
            "exactness.kl_target",
            f"is {target}; must be finite and > 0",
        ),
        *_unless(
            not diverse or 0 < floor <= 1, "exactness.diversity_floor", f"is {floor}; must be in (0, 1]"
        ),
    ]


def _unless(valid: bool, field: str, fault: str) -> list[Violation]:
    return [] if valid else [Violation(field, fault)]


def check_run(run_id: str) -> list[Violation]:
    """Return the violations in the name of a run."""
    fault = f"is {run_id[:140]!r}; must be 1 to 128 of A-Z a-z 0-9 . _ -"
    return _unless(bool(_RUN_ID.fullmatch(run_id)), "run_id", fault)


def _check_prompt(prompt_id: str, field: str) -> list[Violation]:
    fault = f"has {len(prompt_id)} characters; allowed are 1 to {_LONGEST_PROMPT_ID}"
    return _unless(1 <= len(prompt_id) <= _LONGEST_PROMPT_ID, field, fault)


def _check_group(
    group: rollout_pb2.Group, batch: rollout_pb2.SubmitRolloutsRequest, field: str, limits: ModelLimits
) -> list[Violation]:
    violations = _check_prompt(group.prompt_id, f"{field}.prompt_id")
    violations += _unless(group.samples >= 1, f"{field}.samples", f"is {group.samples}; must be at least 1")
    own = group.HasField("sampling")
    sampling = resolve(with_calls(group.sampling, batch.tools) if own else batch.sampling)
    if own:
        violations += check_sampling(sampling, limits, f"{field}.sampling")
        if batch.HasField("tools"):
            violations += check_sampling_with_tools(group.sampling, batch.tools, f"{field}.sampling")
    violations += check_tokens(group.prompt_token_ids, limits, f"{field}.prompt_token_ids")
    prompt = len(group.prompt_token_ids)
    violations += check_lengths(prompt, 0, sampling, limits, f"{field}.prompt_token_ids")
    return violations + check_sample_size(
        prompt, sampling, limits, f"{field}.sampling" if own else "sampling"
    )


def first_difference(known: Message, requested: Message, skipped: Sequence[str] = ()) -> tuple[str, str]:
    """Return the path of the first field that differs, and the difference; both empty if none does.

    Fields are compared in the order of the protocol. Top-level fields named in `skipped` are not compared.
    """
    for field in known.DESCRIPTOR.fields:
        if field.name in skipped:
            continue
        left, right = _field_value(known, field), _field_value(requested, field)
        if left == right:
            continue
        if field.is_repeated:
            return _row_difference(left, right, field.name)
        if isinstance(left, Message) and isinstance(right, Message):
            path, how = first_difference(left, right)
            return f"{field.name}.{path}", how
        return field.name, _change(_enum_name(field, left), _enum_name(field, right))
    return "", ""


def _row_difference(left: Any, right: Any, name: str) -> tuple[str, str]:
    for number, (one, other) in enumerate(zip(left, right, strict=False)):
        if one == other:
            continue
        path = f"{name}[{number}]"
        if isinstance(one, Message):
            inner, how = first_difference(one, other)
            return f"{path}.{inner}", how
        return path, _change(one, other)
    return name, f"had {len(left)} items, has {len(right)}"


def _field_value(message: Message, field: Any) -> Any:
    if field.has_presence and not message.HasField(field.name):
        return _UNSET
    return getattr(message, field.name)


def _enum_name(field: Any, value: Any) -> Any:
    """Return the name of an enum value; any other value as it is."""
    known = None if field.enum_type is None else field.enum_type.values_by_number.get(value)
    return value if known is None else known.name


def _change(one: Any, other: Any) -> str:
    return f"was {_shortened(one)}, is {_shortened(other)}"


def _shortened(value: Any) -> str:
    return "a message" if isinstance(value, Message) else reprlib.repr(value).replace(f"'{_UNSET}'", _UNSET)
