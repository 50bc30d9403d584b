"""Writes the report of a run: one HTML file with everything in it.

    python -m examples.tinymath.report runs/latest

makes it again from the run's `steps.json`, `summary.json` and `decisions.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from examples.tinymath import pictures
from examples.tinymath.decisions import decision_rows, load_decisions
from examples.tinymath.drafter import comparisons
from examples.tinymath.lanes import busy, gaps
from examples.tinymath.records import StepRecord, load_steps, percentiles
from examples.tinymath.spans import step_seconds
from paceline import Decision


def write_report(
    path: Path, records: Sequence[StepRecord], summary: Mapping[str, Any], decisions: Sequence[Decision] = ()
) -> None:
    """Render the report of finished steps and of what the platform decided in them."""
    compared = comparisons(decisions)
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    page = environment.get_template("report.html.j2").render(
        summary=summary,
        tiles=tiles(records, summary),
        rows=[row(record) for record in records],
        speculation=any(record.drafted for record in records),
        caches=any(record.cached for record in records),
        drafter=any(record.drafter_version for record in records),
        compared=bool(compared),
        decisions=decision_rows(decisions, min((record.began for record in records), default=0.0)),
        pictures={
            "reward": pictures.reward_curve(records),
            "lengths": pictures.length_histogram(records),
            "shares": pictures.time_shares(records),
            "throughput": pictures.throughput(records),
            "timelines": pictures.timelines(records),
            "acceptance": pictures.acceptance(compared) if compared else "",
        },
    )
    path.write_text(page)


def tiles(records: Sequence[StepRecord], summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the figures at the top: name, value, remark."""
    first, last = summary["reward_first"], summary["reward_last"]
    whole = sum(r.timing.rollout + r.timing.update + r.timing.push for r in records)
    rollout = sum(record.timing.rollout for record in records)
    found = [
        ("Mean reward", f"{first:.2f} → {last:.2f}", f"first and last of {len(records)} steps"),
        ("Samples", f"{summary['samples']:,}", f"{summary['tokens']:,} tokens"),
        ("Throughput", f"{summary['tokens_per_second']:,.0f}", "tokens per second of rollout"),
        ("Rollout share", f"{rollout / whole:.0%}", f"of {whole:.0f} s in steps"),
        ("Bubbles", f"{bubble_share(records):.0%}", _bubble_remark(records)),
    ]
    if summary["drafted"]:
        rate = summary["accepted"] / summary["drafted"]
        found.append(
            ("Block efficiency", f"{summary['block_efficiency']:.2f}", f"{rate:.0%} of drafts accepted")
        )
    if last_version := records[-1].drafter_version:
        drafted = sum(record.eagle3_drafted for record in records)
        kept = sum(record.eagle3_accepted for record in records)
        remark = (
            f"{kept / drafted:.0%} of its {drafted:,} drafted tokens accepted"
            if drafted
            else "not drafted with"
        )
        found.append(("Drafter", f"version {last_version}", remark))
    if summary["cached_share"]:
        remark = f"of the tokens were there before, {summary['reused_share']:.0%} agreed"
        found.append(("Cached", f"{summary['cached_share']:.0%}", remark))
    return found


def bubble_share(records: Sequence[StepRecord]) -> float:
    """Instance seconds without a sample of the step over all instance seconds of the rollouts, 0 to 1."""
    idle = whole = 0.0
    for record in records:
        idle += sum(record.bubbles.values())
        whole += len(record.instances) * step_seconds(record.spans)
    return idle / whole if whole else 0.0


def filled_share(records: Sequence[StepRecord]) -> float:
    """Share of the rollouts' bubble seconds in which something was generated ahead, 0 to 1."""
    whole = idle = 0.0
    for record in records:
        end = step_seconds(record.spans)
        for name, seconds in record.bubbles.items():
            whole += seconds
            idle += sum(right - left for left, right in gaps(busy(record, name), end))
    return max(0.0, 1 - idle / whole) if whole else 0.0


def _bubble_remark(records: Sequence[StepRecord]) -> str:
    whole = "of the instances' rollout time"
    if not any(record.background for record in records):
        return f"{whole} is idle"
    return f"{whole}; {filled_share(records):.0%} of it filled"


def row(record: StepRecord) -> dict[str, str]:
    """One line of the table."""
    median, high, longest = percentiles(record.lengths)
    return {
        "step": str(record.step),
        "version": str(record.policy_version),
        "reward": f"{record.reward:.3f}",
        "tokens": f"{record.tokens:,}",
        "lengths": f"{median} / {high} / {longest}",
        "rollout": f"{record.timing.rollout:.2f}",
        "rate": f"{record.tokens_per_second:,.0f}",
        "bubbles": " / ".join(f"{seconds:.2f}" for seconds in record.bubbles.values()),
        "learn": f"{record.timing.update:.2f}",
        "push": f"{record.timing.push:.2f}",
        "accepted": f"{record.accepted:,} / {record.drafted:,}",
        "efficiency": f"{record.block_efficiency:.2f}",
        "drafter": f"v{record.drafter_version}: {record.eagle3_accepted:,} / {record.eagle3_drafted:,}",
        "cached": f"{record.coverage:.0%} / {record.reuse:.0%}",
        "drift": f"{record.learned.kl:.0e} / {record.learned.clip_fraction:.1%}",
    }


def main() -> None:
    """Make a report again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/latest"))
    folder = parser.parse_args().folder
    summary = json.loads((folder / "summary.json").read_text())
    decisions = load_decisions(folder / "decisions.json")
    write_report(folder / "report.html", load_steps(folder / "steps.json"), summary, decisions)
    print(folder / "report.html")


if __name__ == "__main__":
    main()
