"""Render a report as one HTML document that loads nothing else. Pure.

`render` makes the document of a finished run, and also the page of a live report, which reloads itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from paceline.report import plots, slow, timeline
from paceline.report.chart import DARK, LIGHT, SERIES, PageChart, Table, css
from paceline.report.facts import RunFacts, RunStep, SamplePath, counted

MOST_DECISIONS = 200
"""Most decisions on the page: the latest ones."""
MOST_INSTANCES = 32
"""Most instances in the table of a live report."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure at the top of the page."""

    name: str
    value: str
    remark: str


def render(facts: RunFacts, refresh: float = 0.0) -> str:
    """Return the document. With `refresh` other than 0 it reloads itself every `refresh` seconds."""
    loader = PackageLoader("paceline.report", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.globals["mark"] = lambda shape: plots.marker(shape, 7, 7)
    return environment.get_template("page.html.j2").render(
        run=facts.run_id or "no run",
        title=f"Paceline: {facts.run_id or 'no run'}",
        subtitle=_subtitle(facts),
        refresh=refresh,
        light=Markup(css(LIGHT)),
        dark=Markup(css(DARK)),
        colours=SERIES,
        tiles=tiles(facts),
        slow=slow.on_slow_steps(facts),
        sections=_sections(facts),
        paths=_paths(facts),
        decisions=_decisions(facts),
        now=_now(facts),
        unread=facts.unread,
        trouble=facts.trouble,
    )


def tiles(facts: RunFacts) -> list[Tile]:
    """Return the figures at the top of the page, without unknown ones."""
    steps = facts.steps
    if not steps:
        return []
    seconds, tokens = sum(step.seconds for step in steps), sum(step.tokens for step in steps)
    instance_seconds = sum(step.seconds * step.instances for step in steps)
    rewards = [step.reward for step in counted(steps) if step.reward is not None]
    found = []
    if rewards:
        found.append(Tile("Mean reward", f"{rewards[0]:.2f} → {rewards[-1]:.2f}", "first and last step"))
    samples = sum(step.samples for step in steps)
    found.append(Tile("Samples", f"{samples:,}", f"{tokens:,} tokens in {len(steps):,} steps"))
    if seconds:
        found.append(Tile("Throughput", f"{tokens / seconds:,.0f}", "tokens per second of rollout"))
    if instance_seconds:
        filled = timeline.filled_share(facts)
        remark = "of the instances' rollout time" + ("" if filled is None else f"; {filled:.0%} of it filled")
        idle = sum(step.bubble_seconds for step in steps) / instance_seconds
        found.append(Tile("Bubbles", f"{idle:.0%}", remark))
    if len(steps) > 1:
        found.append(_generated_ahead(steps[1:], timeline.filled_share(facts)))
    verified = sum(counts.verifications for counts in facts.drafts.values())
    if verified:
        accepted = sum(counts.accepted for counts in facts.drafts.values())
        drafted = sum(counts.drafted for counts in facts.drafts.values())
        remark = f"tokens a verification; {accepted / max(1, drafted):.0%} of drafts accepted"
        found.append(Tile("Block efficiency", f"{1 + accepted / verified:.2f}", remark))
    if facts.lacking_steps:
        remark = "of the engine steps had samples without room in the suffix index: raise draft_index_tokens"
        found.append(Tile("Index full", f"{facts.lacking_steps / max(1, facts.planned_steps):.0%}", remark))
    moved = sum(move.samples for move in facts.moves)
    if moved:
        found.append(Tile("Moves", f"{moved:,}", "samples from one instance to another"))
    return found


def _generated_ahead(steps: Sequence[RunStep], filled: float | None) -> Tile:
    """Return the share of the tokens of these steps that existed when their step began.

    `filled` is the share of the bubbles in which something was generated ahead; None: there were no bubbles.
    """
    announced = sum(step.pregenerated is not None for step in steps)
    tokens = sum(step.tokens for step in steps)
    ahead = sum(step.pregenerated or 0 for step in steps)
    unused = "" if filled is None else f"{1 - filled:.0%} of the bubbles went unused"
    if announced:
        remark = f"of the tokens; {announced:,} of {len(steps):,} steps were announced"
        if unused and announced < len(steps):
            remark += f", and {unused}"
    else:
        remark = "no step was announced" + (f", and {unused}" if unused else "")
        remark += ": give all batches to run.rollouts, or call run.hint"
    return Tile("Generated ahead", f"{ahead / max(1, tokens):.0%}", remark)


def _sections(facts: RunFacts) -> list[dict[str, object]]:
    """Return the sections in order, each with its charts, and a sentence to show if there is none."""
    return [
        _section("reward", "Reward", [plots.rewards(facts)], "No reward was reported (run.report_rewards)."),
        _section("time", "Where the time goes", [plots.where_time_goes(facts)], "No step is over yet."),
        _section("instances", "Timeline of instances", timeline.timelines(facts), "No step is over yet."),
        _section("path", "Critical path", [plots.critical_path(facts)], "No step is over yet."),
        _section(
            "acceptance",
            "Acceptance by drafter and position",
            [plots.acceptance(facts)],
            "Nothing was drafted.",
        ),
        _section(
            "times",
            "Predicted and measured step time",
            [plots.step_times(facts)],
            "No step time was predicted.",
        ),
    ]


def _section(name: str, title: str, charts: Sequence[PageChart | None], nothing: str) -> dict[str, object]:
    return {
        "name": name,
        "title": title,
        "charts": [chart for chart in charts if chart is not None],
        "nothing": nothing,
    }


def _subtitle(facts: RunFacts) -> str:
    if not facts.steps:
        return "No step is over yet."
    last = facts.steps[-1]
    numbers = [step.step for step in counted(facts.steps)]
    begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(step.begun for step in facts.steps)))
    instances = max(step.instances for step in facts.steps)
    fleet = "1 instance" if instances == 1 else f"up to {instances:,} instances"
    words = f"Steps {min(numbers)} to {max(numbers)}, from {begun} on; {fleet}"
    if last.attempt > 1:
        replaced = len(facts.steps) - len(numbers)
        words += f"; the trainer was started {last.attempt} times, and {replaced:,} steps were replaced"
    return f"{words}; policy version {last.version}"


def _paths(facts: RunFacts) -> Table | None:
    """Return a table of the samples that ended last in the latest step, with the instances that ran them."""
    if not facts.steps or not facts.steps[-1].last:
        return None
    step = facts.steps[-1]
    headers = ["sample", "tokens", "seconds", "decode steps", "verified", "restarts", "instances"]
    return Table(headers, [_path_row(path, step.begun) for path in step.last])


def _path_row(path: SamplePath, begun: float) -> list[str]:
    spans = "; ".join(
        f"{span.instance_id} {span.begin - begun:.2f} to {span.end - begun:.2f} s, {span.tokens} tokens"
        for span in path.spans
    )
    return [
        f"{path.prompt_id}, slot {path.slot}",
        f"{path.tokens:,}",
        f"{path.seconds:.3f}",
        f"{path.decode_steps:,}",
        f"{path.verify_steps:,}",
        str(path.restarts),
        spans,
    ]


def _decisions(facts: RunFacts) -> dict[str, object]:
    begun = facts.steps[0].begun if facts.steps else 0.0
    rows = [
        [
            f"{each.time - begun:.1f}" if begun else time.strftime("%H:%M:%S", time.gmtime(each.time)),
            each.kind.replace("_", " "),
            f"{each.predicted_gain:+.0%}" if each.predicted_gain else "",
            each.reason,
        ]
        for each in sorted(facts.decisions, key=lambda each: each.time)[-MOST_DECISIONS:]
    ]
    table = Table(["seconds" if begun else "time", "about", "predicted gain", "reason"], rows)
    return {"table": table, "count": len(facts.decisions), "most": MOST_DECISIONS}


def _now(facts: RunFacts) -> dict[str, object] | None:
    now = facts.now
    if now is None:
        return None
    shown = sorted(now.instances, key=lambda each: (-each.load.running, each.instance_id))[:MOST_INSTANCES]
    rows = [
        [
            each.instance_id,
            str(each.state),
            str(each.policy_version),
            f"{each.load.running:,}",
            f"{each.load.waiting:,}",
            f"{each.load.kv_usage:.0%}",
            f"{each.load.step_seconds * 1e3:.1f}",
        ]
        for each in shown
    ]
    headers = ["instance", "state", "version", "running", "waiting", "KV in use", "engine step ms"]
    unfinished = [each for each in now.batches if each.finished < each.total or each.open]
    return {
        "time": time.strftime("%H:%M:%S UTC", time.gmtime(now.time)),
        "instances": len(now.instances),
        "shown": len(shown),
        "table": Table(headers, rows),
        "batches": unfinished,
    }
