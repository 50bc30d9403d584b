"""Tables of the learner's benchmark, as documents show them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from bench.learner.following import FROZEN
from bench.learner.replay import NONE
from bench.report import format_value

Table = dict[str, Any]


def tables(models: Mapping[str, Mapping[str, Any]], costs: Mapping[str, float]) -> dict[str, Table]:
    """Return columns and rows of text, by name."""
    return {
        "arms": _arms(models),
        "replay": _replay(models),
        "here": _here(models),
        "storing": _storing(costs),
    }


def _arms(models: Mapping[str, Mapping[str, Any]]) -> Table:
    rows = []
    for model, found in models.items():
        for name, each in found["figures"].items():
            places = ", ".join(f"{rate:.2f}" for rate in each["by_place"])
            gain, spread = each["gain_vs_frozen"], each["gain_spread"]
            of_frozen = gain is None or name == FROZEN.name
            rows.append(
                [
                    f"{model}, {name}",
                    str(len(found["seeds"])),
                    f"{each['first']:.2f}",
                    f"{each['last']:.2f}",
                    "" if of_frozen else f"{gain:+.1%}",
                    "" if of_frozen or spread is None else f"{spread:.1%}",
                    places,
                    f"{each['tokens']:,.0f}",
                    format_value(each["update_seconds"]),
                ]
            )
    columns = [
        "",
        "seeds",
        "first steps",
        "last steps",
        "against frozen",
        "spread",
        "last steps, by position",
        "tokens learned",
        "training, s",
    ]
    return {"columns": columns, "rows": rows}


def _replay(models: Mapping[str, Mapping[str, Any]]) -> Table:
    rows = []
    for model, found in models.items():
        seeds = [each["replays"] for each in found["seeds"].values() if "replays" in each]
        for samples in seeds[0] if seeds else ():
            for name in seeds[0][samples]:
                rows.append(
                    [f"{model}, {samples} samples an instance, {name}", *_rollout(seeds, samples, name)]
                )
    columns = [
        "",
        "rollout, s",
        "update, s",
        "rollout and what waits, s",
        "of frozen",
        "last third, of frozen",
        "of none",
        "acceptance length",
        "draft length",
    ]
    return {"columns": columns, "rows": rows}


def _rollout(seeds: Sequence[Mapping[str, Any]], samples: str, name: str) -> list[str]:
    """Return the figures of a follower's simulated rollouts, means over seeds."""
    runs = [each[samples] for each in seeds]

    def mean(key: str) -> float:
        return fmean(run[name][key] for run in runs)

    def ratio(key: str, other: str) -> float:
        return fmean(run[name][key] / run[other][key] for run in runs)

    training = mean("training_seconds")
    return [
        f"{mean('rollout_seconds'):.1f}",
        f"{training:.1f}" if training else "",
        f"{mean('seconds'):.1f}",
        f"{ratio('seconds', FROZEN.name):.3f}",
        f"{ratio('last_rollout_seconds', FROZEN.name):.3f}",
        f"{ratio('seconds', NONE):.3f}",
        f"{mean('acceptance_length'):.2f}",
        f"{mean('draft_length'):.2f}",
    ]


def _here(models: Mapping[str, Mapping[str, Any]]) -> Table:
    rows = [
        [
            f"{model}, {name}",
            f"{each['vs_none']:.2f}",
            f"{each['block_efficiency']:.2f}",
            str(each["steps"]),
            format_value(each["step_ms"]),
            format_value(each["pass_ms"]),
            "yes" if each["same_tokens"] else "no",
        ]
        for model, found in models.items()
        for name, each in found.get("on_cpu", {}).items()
    ]
    columns = ["head and draft length", "tokens/s over none", "tokens a verification", "steps", "step, ms"]
    return {"columns": [*columns, "pass of the head, ms", "tokens of plain decoding"], "rows": rows}


def _storing(costs: Mapping[str, float]) -> Table:
    rows = [
        ["bytes of a token", f"{costs['stored_bytes_a_token']:,.0f}", "0"],
        [
            "GB moved for an update of 262,144 tokens",
            f"{costs['stored_bytes_an_update'] / 1e9:.1f}",
            f"{costs['weights_bytes_a_version'] / 1e9:.0f}, the policy's new weights",
        ],
        [
            "GB/s out of an instance with 256 samples, if every token is stored",
            f"{costs['instance_bytes_a_second'] / 1e9:.2f}",
            "0",
        ],
        [
            "TB of a step of 100,000 samples of 4,000 tokens, if every token is stored",
            f"{costs['stored_bytes_a_step'] / 1e12:.0f}",
            "0",
        ],
        [
            "tokens whose features are as large as the weights",
            f"{costs['stored_tokens_as_large_as_weights']:,.0f}",
            "",
        ],
        [
            "bytes of a token's targets, if the engine stored them: all logits, or the 20 highest",
            f"{costs['logits_bytes_a_token']:,.0f}, or {costs['top_k_bytes_a_token']:,.0f}",
            "",
        ],
        [
            "seconds of forward passes for an update",
            "0",
            f"{costs['second_pass_seconds_an_update']:.1f} on {costs['second_pass_devices']:.0f} H100",
        ],
    ]
    return {"columns": ["computed for 70B", "features stored", "second forward pass"], "rows": rows}
