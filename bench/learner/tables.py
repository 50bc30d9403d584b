"""Compute the figures of followers, and the tables that documents show. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from bench.learner.following import FROZEN, FollowerRecord, RecordedRollouts
from bench.learner.replay import NONE
from bench.report import format_value

LAST = 10
"""Steps at the end of the run, at most half of it, over which the gain is averaged."""


def figures(
    runs: Mapping[str, FollowerRecord], steps: Sequence[RecordedRollouts]
) -> dict[str, dict[str, Any]]:
    """Return a row for each follower."""
    frozen = runs.get(FROZEN.name)
    return {
        name: {
            "first": fmean(run.acceptance_length[: _last(run)]),
            "last": fmean(run.acceptance_length[-_last(run) :]),
            "gain_vs_frozen": gain(run, frozen) if frozen else None,
            "by_place": [fmean(each) for each in zip(*run.by_place[-_last(run) :], strict=True)],
            "divergence": fmean(run.divergence[-_last(run) :]),
            "tokens": run.tokens,
            "update_seconds": sum(run.update_seconds),
            "hidden_share": hidden_share(run, steps),
        }
        for name, run in runs.items()
    }


def over_seeds(tables: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the mean of each figure of each follower over several seeds, and the spread of its gain."""
    found = {}
    for name in tables[0]:
        rows = [table[name] for table in tables]
        row: dict[str, Any] = {
            key: _mean([each[key] for each in rows]) for key in rows[0] if key != "by_place"
        }
        row["by_place"] = [fmean(each) for each in zip(*(row["by_place"] for row in rows), strict=True)]
        gains = [each["gain_vs_frozen"] for each in rows]
        row["gain_spread"] = stdev(gains) if len(gains) > 1 and None not in gains else None
        found[name] = row
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if a value is missing."""
    known = [each for each in values if each is not None]
    return fmean(known) if len(known) == len(values) else None


def _last(run: FollowerRecord) -> int:
    return max(1, min(LAST, len(run.acceptance_length) // 2))


def gain(run: FollowerRecord, other: FollowerRecord) -> float:
    """Return the acceptance length over the last steps divided by another follower's, minus 1."""
    last = _last(run)
    return fmean(run.acceptance_length[-last:]) / fmean(other.acceptance_length[-last:]) - 1


def hidden_share(run: FollowerRecord, steps: Sequence[RecordedRollouts]) -> float | None:
    """Return the share of update seconds that fit between the step's last sample and the end of the next rollout.

    This assumes a separate device for the learner: its seconds are measured alone, and the run's seconds are
    recorded. An update that takes longer would be late for the step that it is counted for.
    """
    total = sum(run.update_seconds)
    pairs = zip(run.update_seconds[2:], steps, strict=False)
    return sum(min(seconds, step.window_seconds) for seconds, step in pairs) / total if total else None


def weighting_verdict(gains: Sequence[float]) -> dict[str, Any]:
    """Return the gain of reward weighting over seeds, and whether it is at least twice the spread.

    `gains` has the gains of the weighted follower over the unweighted one with the same samples, by seed.
    """
    spread = stdev(gains) if len(gains) > 1 else None
    mean = fmean(gains)
    return {
        "reward_gain": mean,
        "reward_gain_spread": spread,
        "reward_seeds": len(gains),
        "reward_weighting_shown": None if spread is None else int(mean >= 2 * spread),
    }


Table = dict[str, Any]


def tables(models: Mapping[str, Mapping[str, Any]]) -> dict[str, Table]:
    """Return columns and rows of text, by table name."""
    return {"arms": _arms(models), "replay": _replay(models)}


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
        "of none, pessimistic",
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
        f"{ratio('slow_seconds', NONE):.3f}",
        f"{mean('acceptance_length'):.2f}",
        f"{mean('draft_length'):.2f}",
    ]
