"""Render a report as one HTML document that loads nothing else. Pure.

`render` makes the document of a finished run, and also the page of a live report, which reloads itself.
`on_slow_steps` writes its sentences: which step was slowest and why, and what changed when step times did.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from paceline.report import plots, timeline
from paceline.report.chart import DARK, LIGHT, SERIES, PageChart, Table, css, short
from paceline.report.facts import RunFacts, RunStep, SamplePath, counted
from paceline.report.plots import phases
from paceline.times import STEP_PARTS
from paceline.types import Decision

WINDOW = 5
"""Steps before and after a change that are compared, at most."""
FEWEST = 3
"""Steps on either side that make a change: fewer are an outlier."""
LEAST_CHANGE = 1.3
"""Ratio of the step times after and before a change, or its inverse."""
MOST_CHANGES = 3
"""Most changes on the page: the largest."""
NAMED_DECISIONS = 3
"""Most decisions that are named with a change: the latest."""
EXPLAINING = ("knobs", "draft_cap", "scaling", "drafter_published", "drafter_rolled_back")
"""Kinds of decisions that may change step times for longer than a step."""
# Samples, response lengths and acceptance are named if they changed by this ratio.
_NOTABLE = 1.2
_WORDS = {
    "earlier": "time before the batch of its last sample",
    "queue": "waiting for an instance",
    "prefill": "prefill",
    "plain": "engine steps without a draft",
    "verified": "engine steps that verified drafts",
    "moves": "moves between instances",
    "between": "time between engine steps",
    "trainer": "the trainer",
    "weights": "the update of weights",
}


def on_slow_steps(facts: RunFacts) -> list[str]:
    """Return a sentence on the slowest step, and one on each lasting change of the step time, in order."""
    # Seconds of each step by part: its last sample's time, and trainer and weights until the next step.
    parts = [_parts(step, parts) for step, parts in zip(facts.steps, phases(facts), strict=True)]
    if not parts:
        return []
    times = [sum(each.values()) for each in parts]
    return [
        _slowest(facts, parts, times),
        *(_change(facts, parts, times, place) for place in _changes(times)),
    ]


def _parts(step: RunStep, phase: Mapping[str, float]) -> dict[str, float]:
    path = dict(step.last[0].parts) if step.last else dict.fromkeys(STEP_PARTS, 0.0)
    earlier = max(0.0, phase["rollout"] - sum(path.values()))
    return {"earlier": earlier, **path, "trainer": phase["trainer"], "weights": phase["weights"]}


def _slowest(facts: RunFacts, parts: Sequence[Mapping[str, float]], times: Sequence[float]) -> str:
    place = max(range(len(times)), key=times.__getitem__)
    step, mine, others = facts.steps[place], parts[place], [*parts[:place], *parts[place + 1 :]]
    words = f"The slowest is {step.name}: {short(times[place])} s"
    if not others:
        part = max(mine, key=mine.__getitem__)
        return f"{words}, of which {_WORDS[part]} took {short(mine[part])} s."
    rest = median([*times[:place], *times[place + 1 :]])
    words += f"; the median of the others is {short(rest)} s."
    if not _changed(rest, times[place]):
        return f"No step was much slower than the others. {words}"
    usual = {part: median(each[part] for each in others) for part in mine}
    part = max(mine, key=lambda each: mine[each] - usual[each])
    words += f" The difference is mostly {_WORDS[part]}: {_instead(usual[part], mine[part])}."
    length = median(_length(each) for each in facts.steps)
    if _changed(length, _length(step)) and part in ("plain", "verified"):
        words += f" Its samples had {short(_length(step))} tokens on average; usual are {short(length)}."
    return words


def _changes(times: Sequence[float]) -> list[int]:
    """Return the places of the largest lasting changes, in order."""
    logs = [math.log(max(time, 1e-9)) for time in times]
    places = [place for place in range(FEWEST, len(times) - FEWEST + 1) if _is_change(times, place)]

    def size(place: int) -> float:
        # Means of logarithms differ most where the change was; medians do not say where.
        before, after = _around(logs, place)
        return abs(fmean(after) - fmean(before))

    chosen: list[int] = []
    for place in sorted(places, key=size, reverse=True):
        if len(chosen) < MOST_CHANGES and all(abs(place - other) > WINDOW for other in chosen):
            chosen.append(place)
    return sorted(chosen)


def _around(values: Sequence[float], place: int) -> tuple[Sequence[float], Sequence[float]]:
    return values[max(0, place - WINDOW) : place], values[place : place + WINDOW]


def _is_change(times: Sequence[float], place: int) -> bool:
    before, after = (median(each) for each in _around(times, place))
    return _changed(before, after, LEAST_CHANGE)


def _change(facts: RunFacts, parts: Sequence[Mapping[str, float]], times: Sequence[float], place: int) -> str:
    before, after = (median(each) for each in _around(times, place))
    left, right = parts[max(0, place - WINDOW) : place], parts[place : place + WINDOW]
    sides = {part: (median(p[part] for p in left), median(p[part] for p in right)) for part in parts[place]}
    sign = 1 if after > before else -1
    part = max(sides, key=lambda each: sign * (sides[each][1] - sides[each][0]))
    step = facts.steps[place]
    words = (
        f"From {step.name} on, steps took {_instead(before, after)}. The difference is mostly {_WORDS[part]}: "
        f"{_instead(*sides[part])}."
    )
    found = list(_causes(facts, place))
    return (
        f"{words} At that time: {'; '.join(found)}."
        if found
        else f"{words} Nothing else in the log changed then."
    )


def _causes(facts: RunFacts, place: int) -> Iterator[str]:
    """Yield what else changed between the steps before a place and those from it on."""
    old, new = facts.steps[place - 1], facts.steps[place]
    before, after = facts.steps[max(0, place - WINDOW) : place], facts.steps[place : place + WINDOW]
    if new.attempt != old.attempt:
        yield "the trainer was started again"
    if old.instances != new.instances:
        yield f"instances {old.instances:,} → {new.instances:,}"
    whole = all(len(step.rows) == step.instances for step in (old, new))
    gone, come = (_names(old) - _names(new), _names(new) - _names(old)) if whole else (set(), set())
    if gone or come:
        yield ", ".join(
            [*(f"without {name}" for name in sorted(gone)), *(f"with {name}" for name in sorted(come))]
        )
    moved = [one.version != other.version for one, other in zip(facts.steps, facts.steps[1:], strict=False)]
    if old.version != new.version and 2 * sum(moved) < len(moved):
        # A version that changes with nearly every step explains nothing.
        yield f"policy version {old.version} → {new.version}"
    drafters = (
        {name for step in before for name in step.drafts},
        {name for step in after for name in step.drafts},
    )
    if drafters[0] != drafters[1]:
        yield f"drafters {', '.join(sorted(drafters[0])) or 'none'} → {', '.join(sorted(drafters[1])) or 'none'}"
    if (old.pregenerated is None) != (new.pregenerated is None):
        yield "steps were no longer announced" if new.pregenerated is None else "steps were announced"
    figures = {
        "samples": [[float(step.samples) for step in side] for side in (before, after)],
        "tokens a sample": [[_length(step) for step in side] for side in (before, after)],
        "tokens a verification": [[*filter(None, map(_efficiency, side))] for side in (before, after)],
    }
    for name, sides in figures.items():
        if all(sides) and _changed(*map(median, sides)):
            yield f"{name} {short(median(sides[0]))} → {short(median(sides[1]))}"
    yield from _decided(facts.decisions, old.begun, new.ended)


def _decided(decisions: Sequence[Decision], begin: float, end: float) -> Iterator[str]:
    found = [each for each in decisions if each.kind in EXPLAINING and begin < each.time <= end]
    for each in found[-NAMED_DECISIONS:]:
        yield f"{each.kind.replace('_', ' ')}: {each.reason}"


def _instead(before: float, after: float) -> str:
    return f"{short(after)} s instead of {short(before)} s"


def _names(step: RunStep) -> set[str]:
    return {row.instance_id for row in step.rows}


def _length(step: RunStep) -> float:
    """Return the mean tokens of a step's samples."""
    return step.tokens / step.samples if step.samples else 0.0


def _efficiency(step: RunStep) -> float | None:
    """Return the tokens per verified draft; None without one."""
    verified = sum(count for count, _ in step.drafts.values())
    return 1 + sum(accepted for _, accepted in step.drafts.values()) / verified if verified else None


def _changed(before: float, after: float, ratio: float = _NOTABLE) -> bool:
    low, high = sorted((before, after))
    return high > ratio * low and high > 0


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
        slow=on_slow_steps(facts),
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
