"""Gain and cost of drafts from rollouts of earlier epochs, with and without pre-generation.

The run that `bench.rollout` records, whose prompts come back after four steps, is replayed by platforms that keep
samples for later epochs and by such that do not. Other programs on the cores change seconds, so figures are counts:
decode steps, what the draft store was sent and sends, and processor time of the services. Only steps after the
first epoch count. Arms are kept under runs/bench/earlier_epochs with the hash of what they depend on. Writes
runs/bench/earlier_epochs.json.

    python -m bench.earlier_epochs [--rounds 2] [--minutes 8]        # until no arm is left
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

from bench.columns import columns, tokens
from bench.comparison import Comparison
from bench.coverage import Coverage
from bench.history import epoch_steps
from bench.replay import Covering, ReplayedStep, ReplaySetup, nothing_covered, replay
from bench.report import console, format_value, show_table, write
from bench.reuse import INDEX_SECONDS
from bench.rollout.cells import cell_key, code_hash
from bench.rollout.record import load_or_record
from bench.rollout.registry import PACELINE, SUBJECTS
from bench.systems import System, plain_platform, platform_of
from bench.trajectory import Trajectory
from paceline import Exactness, ExactnessLevel
from services.local import Platform

FOLDER = Path("runs/bench/earlier_epochs")
_SUBJECT = SUBJECTS["tinymath"]
_RECORDED = Path("runs/bench/rollout") / _SUBJECT.name
_KEPT = 'paceline_gateway_history_rollouts_total{outcome="stored"}'
_CODE = [
    *(Path(name) for name in ("services", "paceline", "kernels")),
    *(Path(f"bench/{name}.py") for name in ("earlier_epochs", "columns", "replay", "reuse", "systems")),
]
_FORGETS = ("--no-history",)
_COUPLED = Exactness(ExactnessLevel.COUPLED_HISTORY)
_COLUMNS = (
    ("decode steps a sample", "decode_steps_mean"),
    ("longest", "decode_steps_max"),
    ("accepted", "acceptance_rate"),
    ("generated ahead", "coverage"),
    ("samples kept", "kept_share"),
    ("tokens fetched", "fetched_share"),
    ("tokens indexed", "indexed_share"),
    ("index, ms a step", "index_milliseconds"),
    ("gateway, ms", "gateway_milliseconds"),
    ("store, ms", "drafts_milliseconds"),
    ("instances, ms", "instance_milliseconds"),
)
"""Samples and tokens as shares of a step's; processor time of all processes of a kind, for each step."""


@dataclass(frozen=True, slots=True)
class EpochArm:
    """A platform and what its batches ask for."""

    name: str
    ahead: bool
    history: bool
    exactness: Exactness = PACELINE.exactness

    @property
    def system(self) -> System:
        """The platform's set-up."""
        options = PACELINE.gateway_options if self.history else (*PACELINE.gateway_options, *_FORGETS)
        return replace(PACELINE, bubbles=self.ahead, gateway_options=options, exactness=self.exactness)


ARMS = (
    EpochArm("generated ahead", ahead=True, history=True),
    EpochArm("generated ahead, no history", ahead=True, history=False),
    EpochArm("not ahead", ahead=False, history=True),
    EpochArm("not ahead, no history", ahead=False, history=False),
    EpochArm("COUPLED_HISTORY, generated ahead", ahead=True, history=True, exactness=_COUPLED),
    EpochArm("COUPLED_HISTORY, not ahead", ahead=False, history=True, exactness=_COUPLED),
)


@dataclass(slots=True)
class ArmRun:
    """A replay: its steps, and the processor seconds of each kind of process up to each of their ends."""

    steps: list[ReplayedStep]
    processor: list[Mapping[str, float]]


def main() -> None:
    """Measure what is missing, show and write."""
    warnings.simplefilter("ignore", SyntaxWarning)  # of packages that reasoning-gym imports
    given, began = _arguments(), time.monotonic()
    run = load_or_record(
        plain_platform(_SUBJECT.model, given.instances, _RECORDED / "recording"),
        _SUBJECT.options,
        _RECORDED,
        lambda step: _say("recorded", step),
    )
    trajectory = replace(run.trajectory, steps=run.trajectory.steps[: given.steps])
    found, left = dict[str, list[dict[str, Any]]](), 0
    for number in range(given.rounds):
        for arm in ARMS:
            kept = FOLDER / "arms" / f"{arm.name}-{number}.json".replace(" ", "_")
            key = cell_key(
                code_hash(_CODE), run.hash, arm, given.instances, given.steps, given.update_seconds
            )
            figures = _kept(kept, key)
            if figures is None and time.monotonic() - began > 60 * given.minutes:
                left += 1
                continue
            if figures is None:
                measured = _measure(arm, trajectory, given.instances, given.update_seconds)
                figures = {"key": key, **figures_of(arm, trajectory, measured)}
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(figures, indent=1) + "\n")
            found.setdefault(arm.name, []).append(figures)
    _show_and_write(found, vars(given))
    if left:
        console().print(f"earlier epochs: {left} arms are left; the same command goes on", highlight=False)


def _kept(path: Path, key: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if found.get("key") == key else None


def _show_and_write(found: Mapping[str, Sequence[Mapping[str, Any]]], options: Mapping[str, Any]) -> None:
    table = {name: means(rounds) for name, rounds in found.items()}
    show_table("earlier epochs: steps after the first epoch", _COLUMNS, table)
    rows = [[name, *(format_value(each[key]) for _, key in _COLUMNS)] for name, each in table.items()]
    write(
        "earlier_epochs",
        {
            "samples_differing": sum(each["differing"] for rounds in found.values() for each in rounds),
            "tokens_compared": sum(each["compared"] for rounds in found.values() for each in rounds),
            "tables": {"arms": {"columns": ["", *(head for head, _ in _COLUMNS)], "rows": rows}},
            "arms": found,
            "options": dict(options),
        },
    )


def _measure(arm: EpochArm, trajectory: Trajectory, instances: int, update_seconds: float) -> ArmRun:
    """Replay the run on a platform of its own."""
    steps = tuple(replace(step, update_seconds=update_seconds) for step in trajectory.steps)
    measured = ArmRun([], [])
    with (
        Platform(platform_of(arm.system, _SUBJECT.model, instances, FOLDER / "platform")) as platform,
        ExitStack() as stack,
    ):
        covering: Covering = stack.enter_context(Coverage(platform)) if arm.ahead else nothing_covered

        def take(step: ReplayedStep) -> None:
            measured.steps.append(step)
            measured.processor.append(_processor_seconds(platform))
            _say(arm.name, step)

        setup = ReplaySetup(f"epochs-{time.time_ns():x}", arm.exactness, hint=arm.ahead)
        replay(platform, replace(trajectory, steps=steps), setup, covering, take)
    return measured


def _processor_seconds(platform: Platform) -> Mapping[str, float]:
    """Return the processor time so far of all processes of each kind, by the first part of their names."""
    found: dict[str, float] = defaultdict(float)
    for child in platform.processes:
        times = psutil.Process(child.pid).cpu_times()
        found[child.spec.name.split("-")[0]] += times.user + times.system
    return found


def figures_of(arm: EpochArm, trajectory: Trajectory, measured: ArmRun) -> dict[str, Any]:
    """Return the figures of a replay, over the steps after the first epoch."""
    first, comparison = epoch_steps(trajectory.options), Comparison()
    if arm.exactness.level is ExactnessLevel.EXACT:
        # Others have other noise than was recorded.
        for recorded, step in zip(trajectory.steps, measured.steps, strict=True):
            comparison.add(arm.name, recorded.step, recorded.responses, step.responses)
    steps, ends = measured.steps[first:], measured.processor
    made, count = sum(map(tokens, steps)), len(steps)
    spent = {kind: seconds - ends[first - 1][kind] for kind, seconds in ends[-1].items()}
    return {
        **columns(steps),
        "compared": comparison.compared,
        "differing": len(comparison.differences),
        "kept_share": _counted(steps, _KEPT) / sum(len(step.samples) for step in steps),
        "fetched_share": _counted(steps, "paceline_drafts_tokens_fetched_total") / made,
        "indexed_share": _counted(steps, 'paceline_drafts_index_tokens_total{phase="insert"}') / made,
        "index_milliseconds": 1e3 * _counted(steps, INDEX_SECONDS) / count,
        **{f"{kind}_milliseconds": 1e3 * seconds / count for kind, seconds in spent.items()},
    }


def _counted(steps: Sequence[ReplayedStep], name: str) -> float:
    """Return the sum of a counter over steps and processes."""
    return sum(metrics[name] for step in steps for metrics in step.metrics.values())


def means(rounds: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the mean over rounds of each figure that is a number; None where a round has none."""
    found: dict[str, float | None] = {}
    for name in rounds[0]:
        values = [each[name] for each in rounds]
        if all(value is None or isinstance(value, int | float) for value in values):
            numbers = [value for value in values if value is not None]
            found[name] = fmean(numbers) if len(numbers) == len(values) else None
    return found


def _say(label: str, step: Any) -> None:
    console().print(
        f"earlier epochs: {label}: step {step.step}, rollout {step.rollout_seconds:.2f} s", highlight=False
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--steps", type=int, default=_SUBJECT.options.steps)
    parser.add_argument("--update-seconds", type=float, default=1.0, help="of the trainer, a wait")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no arm is begun")
    given = parser.parse_args()
    if given.steps <= epoch_steps(_SUBJECT.options):
        parser.error(f"--steps must be above {epoch_steps(_SUBJECT.options)}: the first epoch does not count")
    return given


if __name__ == "__main__":
    main()
