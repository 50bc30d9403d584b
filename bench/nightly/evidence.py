"""List what the kept figures say about each claim that a reader may doubt, for docs/evidence.md. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from bench.report import format_value, markdown_row

Result = Mapping[str, Any]
_HEADS = ("", "figures", "command, day")
_FIELD = re.compile(r"\{(.+?)(:%)?\}")


class Answer(NamedTuple):
    """Figures of a benchmark that support or limit a claim, whose number in the document is `number`.

    `text` has fields for figures: {NAME}, {NAME:%} as a percentage, {TABLE|CELL|...|COLUMN} for a cell of the row
    that begins with these cells, and {SUBJECT>SYSTEM} for a system's speed in the long tail of bench.rollout.
    """

    number: int
    benchmark: str
    text: str


def answer_table(published: Mapping[str, Result]) -> list[str]:
    """Return the lines of the table of all answers; figures of older code are marked.

    A quick run may lack a figure, such as that of 1,000 instances; its answer says so.
    """
    lines = [markdown_row(*_HEADS), markdown_row(*["---"] * len(_HEADS))]
    for answer in ANSWERS:
        result = published.get(answer.benchmark)
        if result is None:
            cells = ("no results are kept yet", f"`make bench NAME={answer.benchmark}`")
        else:
            cells = (_text(answer, result), _origin(result))
        lines.append(markdown_row(answer.number, *cells))
    return lines


def _text(answer: Answer, result: Result) -> str:
    try:
        return _FIELD.sub(lambda field: _figure(result, *field.groups()), answer.text)
    except (KeyError, ValueError):
        return "the last run has no such figure"


def _origin(result: Result) -> str:
    mark = f"; **{result['mark']}**" if result.get("mark") else ""
    return f"`{result['command']}`, {result['measured_at'][:10]}{mark}"


def _figure(result: Result, name: str, percent: str | None) -> str:
    if "|" in name:
        table, *first, column = name.split("|")
        found = result["tables"][table]
        (row,) = (each for each in found["rows"] if list(each[: len(first)]) == first)
        return str(row[list(found["columns"]).index(column)])
    if ">" in name:
        subject, system = name.split(">")
        row = result["subjects"][subject]["rows"]["long tail"][system]
        return format_value(row["speedup_vs_plain"]["median"])
    value = result["figures"][name]
    return f"{value:.0%}" if percent else format_value(value)


def _replayed(model: str) -> str:
    low, high, published = (
        f"{{rollouts|EfficientRollout|{model}|Quantized self-SD|{column}}}"
        for column in ("pessimistic", "optimistic", "published")
    )
    return f"{model}: {low} and {high}, published {published}"


ANSWERS = (
    Answer(
        1,
        "precision",
        "tokens in a thousand that differ in a batch of another shape:"
        " {float32_differing_per_thousand} in float32 ({float32_compared} tokens),"
        " {bfloat16_differing_per_thousand} in bfloat16 ({bfloat16_compared} tokens),"
        " {batch_invariant_differing_per_thousand} in bfloat16 with `batch_invariant`"
        " ({batch_invariant_compared} tokens); differences in bfloat16 that are no near-ties:"
        " {bfloat16_no_near_ties}; a step with `batch_invariant`, of bfloat16's:"
        " {batch_invariant_step_of_bfloat16}, with drafts {batch_invariant_verifying_step_of_bfloat16}",
    ),
    Answer(1, "rollout.smollm2", "tokens that differ from plain vLLM's in float32: {tokens_differing}"),
    Answer(
        2,
        "device_clock",
        "times as fast as plain decoding, modelled: {compared|paceline|latency-bound} latency-bound,"
        " {compared|paceline|compute-bound} compute-bound, {compared|paceline|long tail} long tail",
    ),
    Answer(
        2,
        "simulate.replays",
        "a verifying step takes {verification_factor} times its table's time, the host {host_ms} ms; error in the"
        " paper left out of the fit {step_error:%}; published speeds outside the band: by {lookups_off:%} with"
        " look-ups, {models_off:%} with draft models",
    ),
    Answer(
        2,
        "axes",
        "tokens a step with a draft to the same noise: {points|length|128|ahead|tokens a step} at 128 tokens,"
        " {points|length|4096|ahead|tokens a step} at 4,096, {points|length|16384|ahead|tokens a step} at 16,384,"
        " {points|vocabulary|64|ahead|tokens a step} at a vocabulary of 64,"
        " {points|vocabulary|131072|ahead|tokens a step} at 131,072,"
        " {points|kl|0.001|ahead|tokens a step} at a KL of 1e-3",
    ),
    Answer(
        3,
        "device_clock",
        "times as fast as plain decoding, same and other noise (half of the samples):"
        " {compared|paceline, idle time, no forks|long tail, half} and"
        " {compared|paceline, idle time, other noise|long tail, half}; colocated trainer"
        " {compared|paceline, colocated trainer|long tail}; one step off"
        " {compared|paceline, one step off|long tail}",
    ),
    Answer(
        4,
        "device_clock",
        "times as fast as plain decoding: vLLM's suffix decoding with 8, 16 and 24 drafts"
        " {compared|vllm suffix, 8 drafts|long tail}, {compared|vllm suffix, 16 drafts|long tail},"
        " {compared|vllm suffix, 24 drafts (default)|long tail}; Paceline {compared|paceline|long tail},"
        " {speedup_vs_best_vllm_long_tail} times as fast as the best of them",
    ),
    Answer(
        4,
        "rollout.smollm2",
        "times as fast as vLLM's best with 8 drafts, measured on CPUs, long tail:"
        " {speedup_vs_best_vllm_long_tail}",
    ),
    Answer(
        5,
        "axes",
        "tokens a step with the response of an earlier epoch to the same noise:"
        " {points|lag|1|epoch|tokens a step} after 1 update, {points|base||epoch|tokens a step} after 4,"
        " {points|lag|16|epoch|tokens a step} after 16, {points|lag|64|epoch|tokens a step} after 64",
    ),
    Answer(
        5,
        "axes.recorded",
        "tokens a step from history alone on a language model's run: {history_tokens_per_step}",
    ),
    Answer(
        6,
        "simulate.replays",
        "a 4-bit copy drafts, times as fast as plain decoding at both ends of the band: "
        + "; ".join(map(_replayed, ("Qwen2.5-7B", "Qwen2.5-14B", "Llama3.1-8B"))),
    ),
    Answer(6, "rollout", "the same on CPUs, measured, long tail: {tinymath>efficientrollout} of plain"),
    Answer(7, "gpu", "see [performance](performance.md#on-a-gpu)"),
    Answer(
        8,
        "learner",
        "tokens a verification of a frozen head, first and last steps: {arms|tinymath, frozen|first steps} and"
        " {arms|tinymath, frozen|last steps}; rollout time of a head that follows, of the frozen one's:"
        " {rollout_time_vs_frozen}",
    ),
    Answer(
        9,
        "policy",
        "planner against plain decoding at worst: {planner_worst_vs_plain}, upper bound"
        " {planner_worst_vs_plain_upper}; against the best fixed length in the first round:"
        " {planner_vs_best_fixed_cold}",
    ),
    Answer(
        9,
        "policy.simulated",
        "simulated devices, against plain decoding at worst: {worst_vs_plain_first_32} in the first 32 steps,"
        " {worst_vs_plain} later",
    ),
    Answer(
        10,
        "fleet",
        "1,000 instances, 100,000 samples of 430 tokens:"
        " {fleets|1,000|gateway, ms of processor time a sample} ms a sample,"
        " {fleets|1,000|share of a core} of a core",
    ),
    Answer(
        11,
        "migration",
        "overhead of moves {overhead_share} of the time, stall {stall_steps_median} steps; throughput"
        " {figure5_ratio} times in Figure 5's load, {tail_ratio} in a long tail",
    ),
)
"""The answers, in the order of the claims."""
