"""List what the kept figures say about each claim that a reader may doubt, for docs/evidence.md. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.report import format_value, markdown_row

Result = Mapping[str, Any]
_HEADS = ("", "figures", "command, day")


@dataclass(frozen=True, slots=True)
class Answer:
    """Figures of a benchmark that support or limit a claim. `number` is the claim's number in the document."""

    number: int
    benchmark: str
    text: Callable[[Result], str]


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
        return answer.text(result)
    except (KeyError, ValueError):
        return "the last run has no such figure"


def _origin(result: Result) -> str:
    mark = f"; **{result['mark']}**" if result.get("mark") else ""
    return f"`{result['command']}`, {result['measured_at'][:10]}{mark}"


def _figure(result: Result, name: str) -> str:
    return format_value(result["figures"][name])


def _cell(result: Result, table: str, first: Sequence[str], column: str) -> str:
    """Return a cell of the row that begins with these cells."""
    found = result["tables"][table]
    (row,) = (each for each in found["rows"] if list(each[: len(first)]) == list(first))
    return str(row[list(found["columns"]).index(column)])


def _bfloat16(result: Result) -> str:
    modes = {
        "float32": "float32",
        "bfloat16": "bfloat16",
        "batch_invariant": "bfloat16 with `batch_invariant`",
    }
    differing = ", ".join(
        f"{_figure(result, f'{name}_differing_per_thousand')} in {mode}"
        f" ({_figure(result, f'{name}_compared')} tokens)"
        for name, mode in modes.items()
    )
    return (
        f"tokens in a thousand that differ in a batch of another shape: {differing};"
        f" differences in bfloat16 that are no near-ties: {_figure(result, 'bfloat16_no_near_ties')};"
        f" a step with `batch_invariant`, of bfloat16's: {_figure(result, 'batch_invariant_step_of_bfloat16')},"
        f" with drafts {_figure(result, 'batch_invariant_verifying_step_of_bfloat16')}"
    )


def _clocked(result: Result, system: str, regime: str = "long tail") -> str:
    """Return the speed of a system on the device's clock, with its band."""
    return _cell(result, "compared", [system], regime)


def _axis(result: Result, axis: str, point: str, drafts: str) -> str:
    return _cell(result, "points", [axis, point, drafts], "tokens a step")


def _rollout(result: Result, subject: str, system: str) -> str:
    return format_value(
        result["subjects"][subject]["rows"]["long tail"][system]["speedup_vs_plain"]["median"]
    )


def _replayed(result: Result, paper: str, model: str, method: str) -> str:
    first = [paper, model, method]
    low, high, published = (
        _cell(result, "rollouts", first, name) for name in ("pessimistic", "optimistic", "published")
    )
    return f"{model}: {low} and {high}, published {published}"


ANSWERS = (
    Answer(1, "precision", _bfloat16),
    Answer(
        1,
        "rollout.smollm2",
        lambda found: (
            f"tokens that differ from plain vLLM's in float32: {_figure(found, 'tokens_differing')}"
        ),
    ),
    Answer(
        2,
        "device_clock",
        lambda found: (
            "times as fast as plain decoding, modelled: "
            + ", ".join(
                f"{_clocked(found, 'paceline', regime)} {regime}"
                for regime in ("latency-bound", "compute-bound", "long tail")
            )
        ),
    ),
    Answer(
        2,
        "simulate.replays",
        lambda found: (
            f"a verifying step takes {_figure(found, 'verification_factor')} times its table's time, the host"
            f" {_figure(found, 'host_ms')} ms; error in the paper left out of the fit"
            f" {found['figures']['step_error']:.0%}; published speeds outside the band: by"
            f" {found['figures']['lookups_off']:.0%} with look-ups,"
            f" {found['figures']['models_off']:.0%} with draft models"
        ),
    ),
    Answer(
        2,
        "axes",
        lambda found: (
            "tokens a step with a draft to the same noise: "
            + ", ".join(
                f"{_axis(found, axis, point, 'ahead')} at {name}"
                for axis, point, name in (
                    ("length", "128", "128 tokens"),
                    ("length", "4096", "4,096"),
                    ("length", "16384", "16,384"),
                    ("vocabulary", "64", "a vocabulary of 64"),
                    ("vocabulary", "131072", "131,072"),
                    ("kl", "0.001", "a KL of 1e-3"),
                )
            )
        ),
    ),
    Answer(
        3,
        "device_clock",
        lambda found: (
            "times as fast as plain decoding, same and other noise (half of the samples): "
            f"{_clocked(found, 'paceline, idle time, no forks', 'long tail, half')} and"
            f" {_clocked(found, 'paceline, idle time, other noise', 'long tail, half')}; colocated trainer"
            f" {_clocked(found, 'paceline, colocated trainer')}; one step off"
            f" {_clocked(found, 'paceline, one step off')}"
        ),
    ),
    Answer(
        4,
        "device_clock",
        lambda found: (
            "times as fast as plain decoding: vLLM's suffix decoding with 8, 16 and 24 drafts "
            + ", ".join(
                _clocked(found, f"vllm suffix, {name}")
                for name in ("8 drafts", "16 drafts", "24 drafts (default)")
            )
            + f"; Paceline {_clocked(found, 'paceline')},"
            f" {_figure(found, 'speedup_vs_best_vllm_long_tail')} times as fast as the best of them"
        ),
    ),
    Answer(
        4,
        "rollout.smollm2",
        lambda found: (
            "times as fast as vLLM's best with 8 drafts, measured on CPUs, long tail:"
            f" {_figure(found, 'speedup_vs_best_vllm_long_tail')}"
        ),
    ),
    Answer(
        5,
        "axes",
        lambda found: (
            "tokens a step with the response of an earlier epoch to the same noise: "
            + ", ".join(
                f"{_axis(found, axis, point, 'epoch')} after {updates}"
                for axis, point, updates in (
                    ("lag", "1", "1 update"),
                    ("base", "", "4"),
                    ("lag", "16", "16"),
                    ("lag", "64", "64"),
                )
            )
        ),
    ),
    Answer(
        5,
        "axes.recorded",
        lambda found: (
            "tokens a step from history alone on a language model's run:"
            f" {_figure(found, 'history_tokens_per_step')}"
        ),
    ),
    Answer(
        6,
        "simulate.replays",
        lambda found: (
            "a 4-bit copy drafts, times as fast as plain decoding at both ends of the band: "
            + "; ".join(
                _replayed(found, "EfficientRollout", model, "Quantized self-SD")
                for model in ("Qwen2.5-7B", "Qwen2.5-14B", "Llama3.1-8B")
            )
        ),
    ),
    Answer(
        6,
        "rollout",
        lambda found: (
            f"the same on CPUs, measured, long tail: {_rollout(found, 'tinymath', 'efficientrollout')} of plain"
        ),
    ),
    Answer(7, "gpu", lambda found: "see [performance](performance.md#on-a-gpu)"),
    Answer(
        8,
        "learner",
        lambda found: (
            "tokens a verification of a frozen head, first and last steps: "
            f"{_cell(found, 'arms', ['tinymath, frozen'], 'first steps')} and"
            f" {_cell(found, 'arms', ['tinymath, frozen'], 'last steps')}; rollout time of a head"
            f" that follows, of the frozen one's: {_figure(found, 'rollout_time_vs_frozen')}"
        ),
    ),
    Answer(
        9,
        "policy",
        lambda found: (
            f"planner against plain decoding at worst: {_figure(found, 'planner_worst_vs_plain')}, upper bound"
            f" {_figure(found, 'planner_worst_vs_plain_upper')}; against the best fixed length in the first round:"
            f" {_figure(found, 'planner_vs_best_fixed_cold')}"
        ),
    ),
    Answer(
        9,
        "policy.simulated",
        lambda found: (
            "simulated devices, against plain decoding at worst:"
            f" {_figure(found, 'worst_vs_plain_first_32')} in the first 32 steps,"
            f" {_figure(found, 'worst_vs_plain')} later"
        ),
    ),
    Answer(
        10,
        "fleet",
        lambda found: (
            "1,000 instances, 100,000 samples of 430 tokens: "
            f"{_cell(found, 'fleets', ['1,000'], 'gateway, ms of processor time a sample')} ms a sample,"
            f" {_cell(found, 'fleets', ['1,000'], 'share of a core')} of a core"
        ),
    ),
    Answer(
        11,
        "migration",
        lambda found: (
            f"overhead of moves {_figure(found, 'overhead_share')} of the time, stall"
            f" {_figure(found, 'stall_steps_median')} steps; throughput {_figure(found, 'figure5_ratio')} times in"
            f" Figure 5's load, {_figure(found, 'tail_ratio')} in a long tail"
        ),
    ),
)
"""The answers, in the order of the claims."""
