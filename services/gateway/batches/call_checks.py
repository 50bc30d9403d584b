"""Checks of requests for tool calls, field by field. Pure."""

from paceline.errors import Violation
from paceline.times import seconds_of
from paceline.v1 import rollout_pb2, sample_pb2
from services.contracts.sampling import ModelLimits, Sampling, check_sampling

_NAMES = {"tools.stop_token_ids": "tools.call_token_ids", "tools.stop": "tools.call_strings"}


def check_tools(
    request: rollout_pb2.SubmitRolloutsRequest, limits: ModelLimits, most_calls: int
) -> list[Violation]:
    """Return the violations in what a batch says of tool calls, and in what does not go with them."""
    tools = request.tools
    calls = Sampling(stop_token_ids=tuple(tools.call_token_ids), stop=tuple(tools.call_strings))
    found = [_renamed(violation) for violation in check_sampling(calls, limits, "tools")]
    if not (tools.call_token_ids or tools.call_strings):
        found.append(
            Violation("tools", "has neither call_token_ids nor call_strings: nothing would be a call")
        )
    if tools.max_calls > most_calls:
        fault = f"is {tools.max_calls}; must be at most {most_calls}, or 0 for that"
        found.append(Violation("tools.max_calls", fault))
    if tools.HasField("max_wait") and seconds_of(tools.max_wait) <= 0:
        found.append(Violation("tools.max_wait", "must be above 0; leave it unset for the gateway's"))
    found += check_beside_calls(request.sampling, tools, "sampling")
    if request.exactness.level == sample_pb2.EXACTNESS_LEVEL_LENIENT:
        fault = "is LENIENT, which does not go with tools: a cached rollout has the answers of another environment"
        found.append(Violation("exactness.level", fault))
    if request.stale == rollout_pb2.STALE_REGENERATE:
        fault = "is REGENERATE, which does not go with tools: an environment does not go back; REFUSE ends samples"
        found.append(Violation("stale", fault))
    return found


def check_beside_calls(
    sampling: sample_pb2.SamplingParams, tools: sample_pb2.ToolUse, field: str
) -> list[Violation]:
    """Return the violations in sampling parameters of samples that call tools."""
    found = []
    if sampling.json_schema:
        fault = "is set; it does not go with tools, as it would describe their answers, too"
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


def _renamed(violation: Violation) -> Violation:
    for name, own in _NAMES.items():
        if violation.field == name or violation.field.startswith(f"{name}["):
            return Violation(own + violation.field[len(name) :], violation.description)
    return violation
