"""Demo of Paceline on this machine: instances, and a trainer of arithmetic. `demo_flags.py` has its flags."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich import console as rich
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from examples.tinymath.curriculum import Curriculum, curriculum_of
from examples.tinymath.decisions import DecisionWatch
from examples.tinymath.demo_flags import parse
from examples.tinymath.options import Options, read_options, usual_options
from examples.tinymath.plainly import PlainComparison, SampledStep, compare
from examples.tinymath.records import StepRecord, percentiles, save_steps, summarize
from examples.tinymath.train import new_learner, train
from paceline import Client, ExactnessLevel, Group, KnobSetting, Sample, WeightFolder
from paceline.cli.options import plain_console
from paceline.cli.report import write_report
from services.local import Platform, PlatformConfig, PlatformError
from services.local.child import ProgressLines
from services.local.config import DeviceChoice
from services.local.doctor import examine, refused
from services.local.machine import chooses_cuda
from services.models.local_model import local_model
from services.models.source import ModelError
from services.step_time.machine import driver_gpus

_TIME_COLUMNS = {
    "step": 4,
    "reward": 6,
    "tokens": 7,
    "p50/p95/max": 14,
    "rollout s": 9,
    "tok/s": 6,
    "bubbles s": 9,
    "update s": 8,
    "send s": 6,
}
_DRAFT_COLUMNS = {
    "step": 4,
    "accepted": 13,
    "block eff.": 10,
    "cached": 6,
    "reused": 6,
    "drafter": 7,
    "eagle3": 13,
}
"""Columns of the two tables and their least widths: at most 80 characters in a line."""
LEARNER_OPTIONS = ("--batch-tokens=512", "--held-out-share=0.2", "--report-seconds=0.5")
"""Options of the online learner: the demo's steps are small, so it takes several optimizer steps from each."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Options of the demo's platform; `Options` has the training options."""

    model: Path
    curriculum: Curriculum
    instances: int
    device: DeviceChoice
    dtype: str
    out: Path
    instance_options: tuple[str, ...]
    learner: bool = False
    """Draft with an EAGLE-3 head that learns during training."""
    policy: str | None = None
    """Mode of speculation; None leaves it to the instances."""


class Screen:
    """Display of finished steps and of the present one: live on a terminal, and line by line elsewhere."""

    def __init__(self, console: Console, options: Options) -> None:
        self._console = console
        self._options = options
        self._records: list[StepRecord] = []
        self._progress = Progress(
            TextColumn("{task.description:24}"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn()
        )
        self._task = self._progress.add_task("submitting", total=options.prompts * options.samples)
        self._live = Live(self._progress, console=console, refresh_per_second=4)
        self.awaited = "the trainer to load its model"
        """The event that the demo waits for, in words."""

    @property
    def display(self) -> AbstractContextManager[object]:
        """Context in which steps are shown. Without a terminal a line every ten seconds says what is awaited."""
        if self._console.is_terminal:
            return self._live
        return ProgressLines(self._print, time.monotonic(), list, lambda: [self.awaited])

    def watch(self, step: int, finished: int, total: int) -> None:
        """Show that a sample has arrived."""
        left = total - finished
        self.awaited = f"{left} of {total} samples of step {step}" if left else f"the update of step {step}"
        text = f"step {step}: {'rollout' if left else 'reward, learn, send'}"
        self._progress.update(self._task, description=text, completed=finished, total=total)

    def add(self, record: StepRecord) -> None:
        """Show that a step is finished."""
        self._records.append(record)
        self.awaited = f"the first sample of step {record.step + 1}"
        last = len(self._records) == self._options.steps
        if self._console.is_terminal:
            self._progress.reset(self._task, description=f"step {record.step + 1}: submitting")
            shown = [Text("\n".join(lines)) for lines in step_tables(self._records)]
            self._live.update(rich.Group(*shown, *([] if last else [self._progress])))
            return
        header, *_, line = step_tables(self._records)[0]
        for each in ([header] if len(self._records) == 1 else []) + [line]:
            self._print(each)
        if last:
            for lines in step_tables(self._records)[1:]:
                self._print("\n".join(["", *lines]))

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)


def step_tables(records: Sequence[StepRecord]) -> list[list[str]]:
    """Return the lines of a table of times and, if there were drafts or cached rollouts, of a table of these."""
    tables = [_lines(_TIME_COLUMNS, [_time_cells(record) for record in records])]
    if any(record.drafted or record.cached or record.drafter_version for record in records):
        tables.append(_lines(_DRAFT_COLUMNS, [_draft_cells(record) for record in records]))
    return tables


def _lines(columns: Mapping[str, int], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a header and a line for each row; a column without a cell is left out."""
    used = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    widths = list(columns.values())
    return [" ".join(f"{row[place]:>{widths[place]}}" for place in used) for row in (list(columns), *rows)]


def _time_cells(record: StepRecord) -> list[str]:
    return [
        str(record.step),
        f"{record.reward:.3f}",
        str(record.tokens),
        "/".join(map(str, percentiles(record.lengths))),
        f"{record.timing.rollout:.2f}",
        f"{record.tokens_per_second:.0f}",
        f"{sum(record.bubbles.values()):.2f}",
        f"{record.timing.update:.2f}",
        f"{record.timing.push:.2f}",
    ]


def _draft_cells(record: StepRecord) -> list[str]:
    return [
        str(record.step),
        f"{record.accepted}/{record.drafted}",
        f"{record.block_efficiency:.2f}",
        f"{record.coverage:.0%}",
        f"{record.reuse:.0%}",
        f"v{record.drafter_version}" if record.drafter_version else "",
        f"{record.eagle3_accepted}/{record.eagle3_drafted}" if record.eagle3_drafted else "",
    ]


def run_demo(setup: Setup, options: Options, console: Console) -> dict[str, Any]:
    """Run everything and return the summary."""
    began, started = time.monotonic(), datetime.now().astimezone()
    count = f"{setup.instances} instance{'s' if setup.instances != 1 else ''}"
    console.print(f"Starting {count} of {_shown(setup.model)} and a gateway ...", soft_wrap=True)
    config = PlatformConfig(
        model=setup.model.absolute(),
        instances=setup.instances,
        device=setup.device,
        folder=setup.out,
        learner=setup.learner,
        learner_options=LEARNER_OPTIONS,
        instance_options=(f"--dtype={setup.dtype}", *setup.instance_options),
    )
    with Platform(config, report=console.print) as platform, platform.client() as client:
        ready = time.monotonic()
        console.print(f"Gateway on {platform.gateway_address}; ready after {ready - began:.0f} s.")
        device = client.instances()[0].device
        with DecisionWatch(platform.client()) as watch:
            if setup.policy is not None:
                set_mode(client, setup.policy)
            screen = Screen(console, options)
            with screen.display:
                records, kept = _train(client, setup, options, screen)
                screen.awaited = "the decisions on the last step"
                watch.wait_for(options.steps - 1)
        decisions = watch.decisions
        plainly = None
        if kept is not None:
            console.print("\nDecoding the last step plainly, to compare ...")
            plainly = compare(client, f"plain-{time.time_ns():x}", kept, options)
    summary = {
        "name": f"{setup.curriculum.name}, GRPO, {options.steps} steps",
        "started": started.strftime("%Y-%m-%d %H:%M"),
        "model": _shown(setup.model),
        "instances": setup.instances,
        "device": device,
        "start_seconds": ready - began,
        "wall_seconds": time.monotonic() - began,
        "report": str(setup.out / "report.html"),
        "plainly": None if plainly is None else asdict(plainly),
        **summarize(
            records,
            {
                **asdict(options),
                "dtype": setup.dtype,
                "policy": setup.policy or "planner",
                "learner": setup.learner,
            },
        ),
    }
    save_steps(setup.out / "steps.json", records)
    (setup.out / "summary.json").write_text(json.dumps(summary, indent=2))
    write_report(decisions, setup.out / "report.html", save=setup.out / "report.jsonl")
    return summary


def set_mode(client: Client, mode: str) -> None:
    """Set the mode of speculation of all instances."""
    setting = client.knobs()
    client.set_knobs("", KnobSetting(setting.revision, {**setting.knobs, "mode": mode}))


def _train(
    client: Client, setup: Setup, options: Options, screen: Screen
) -> tuple[list[StepRecord], SampledStep | None]:
    """Train; return the steps, and the last sampled step if plain decoding must give the same tokens."""
    learner = new_learner(setup.model, options)
    # The learner of the drafter reads the weights of a step from their folder after the step.
    weights = WeightFolder(setup.out / "weights", setup.model, keep=4) if setup.learner else None
    records: list[StepRecord] = []
    kept: list[SampledStep] = []

    def keep(step: int, asked: Sequence[Group], samples: Sequence[Sample], seconds: float) -> None:
        if step == options.steps - 1 and options.exactness is ExactnessLevel.EXACT:
            kept.append(SampledStep.of(learner.model, step, asked, samples, seconds))

    run_id = f"{setup.curriculum.name}-{time.time_ns():x}"
    with client.run(run_id, seed=options.seed, weights=weights) as run:
        for record in train(run, learner, options, screen.watch, setup.curriculum, keep):
            filled = replace(record, drafter_version=client.versions().drafter_version)
            records.append(filled)
            screen.add(filled)
    return records, kept[0] if kept else None


def _shown(path: Path) -> str:
    """Return the path relative to the working directory if it is inside it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _link_latest(out: Path) -> None:
    """Make `latest`, next to the folder of the run, a link to it."""
    link = out.parent / "latest"
    if out.name == "latest" or (link.exists() and not link.is_symlink()):
        return
    link.unlink(missing_ok=True)
    link.symlink_to(out.name)


def _print_summary(summary: dict[str, Any], console: Console) -> None:
    console.print(
        f"\nReward {summary['reward_first']:.3f} in the first step, {summary['reward_last']:.3f} in the last."
    )
    console.print(
        f"{summary['samples']} samples, {summary['tokens']} tokens, "
        f"{summary['tokens_per_second']:.0f} tokens/s; {summary['wall_seconds']:.0f} s in all."
    )
    if summary["plainly"] is not None:
        console.print(str(PlainComparison(**summary["plainly"])))
    console.print(f"Report: {summary['report']}", soft_wrap=True)


def read_setup(given: argparse.Namespace, model: Path) -> tuple[Setup, Options]:
    """Return the options for a model. ValueError: one cannot be used."""
    curriculum = curriculum_of(model)
    on_gpus = driver_gpus() if chooses_cuda(given.device, driver_gpus()) else 0
    setup = Setup(
        model=model,
        curriculum=curriculum,
        instances=given.instances or on_gpus or 2,
        device=given.device,
        dtype=given.dtype,
        out=given.out,
        instance_options=tuple(given.instance_option),
        learner=given.learner,
        policy=given.policy,
    )
    return setup, read_options(given, usual_options(curriculum))


def main(given: argparse.Namespace) -> int:
    """Run the demo with flags of `parse`, and return the exit status."""
    console = plain_console()
    try:
        # Before a download that may be long.
        machine = PlatformConfig(
            Path(given.model), instances=given.instances or 1, device=given.device, folder=given.out
        )
        if refused(examine(machine, None)):
            return 1
        model = local_model(given.model, lambda line: print(f"model: {line}", flush=True))
        if refused(examine(machine, model)):
            return 1
        setup, options = read_setup(given, model)
        setup.out.mkdir(parents=True, exist_ok=True)
    except (ModelError, OSError, ValueError) as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 1
    warnings.simplefilter("ignore", SyntaxWarning)  # of packages that reasoning-gym imports
    try:
        summary = run_demo(setup, options, console)
    except PlatformError as error:
        console.print(f"The platform failed: {error}", soft_wrap=True)
        return 1
    _link_latest(setup.out)
    _print_summary(summary, console)
    return 0


if __name__ == "__main__":
    sys.exit(main(parse(None)))
