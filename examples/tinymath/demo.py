"""Demo of Paceline on this machine: instances, gateway, and a trainer that learns arithmetic.

    python -m examples.tinymath.demo            # ten steps on two instances
    python -m examples.tinymath.demo --steps 3 --prompts 8 --out runs/small
    python -m examples.tinymath.demo --model smollm2      # a language model on problems in words

Writes `summary.json`, `steps.json`, logs, and the page of `paceline report` with its entries (`report.html`,
`report.jsonl`) to a folder under runs/; runs/latest links to the latest one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich import console as rich
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.tinymath.curriculum import Curriculum, curriculum_of
from examples.tinymath.decisions import DecisionWatch
from examples.tinymath.plainly import PlainComparison, SampledStep, compare
from examples.tinymath.records import StepRecord, percentiles, save_steps, summarize
from examples.tinymath.train import (
    MODEL,
    Options,
    add_options,
    new_learner,
    read_options,
    train,
    usual_options,
)
from paceline import Client, ExactnessLevel, Group, KnobSetting, Sample, WeightFolder
from paceline.cli.report import write_report
from services.local import Platform, PlatformConfig, PlatformError
from services.local.machine import chooses_cuda
from services.models.download import DownloadError
from services.models.local_model import local_model
from services.models.source import SourceError
from services.step_time.machine import driver_gpus

_TIME_COLUMNS = (
    "step",
    "reward",
    "tokens",
    "p50/p95/max",
    "rollout s",
    "tok/s",
    "bubbles s",
    "update s",
    "send s",
)
_DRAFT_COLUMNS = ("step", "accepted", "block eff.", "cached", "reused", "drafter", "eagle3")
LEARNER_OPTIONS = ("--batch-tokens=512", "--held-out-share=0.2", "--report-seconds=0.5")
"""Options of the online learner: the demo's steps are small, so it takes several optimizer steps from each."""
POLICIES = ("fixed", "adaptive", "solver", "toggle", "planner")
"""Modes of speculation; see docs/policy.md."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Options of the demo's platform; `Options` has the training options."""

    model: Path
    curriculum: Curriculum
    instances: int
    device: Literal["auto", "cpu", "cuda"]
    dtype: str
    out: Path
    instance_options: tuple[str, ...]
    learner: bool = False
    """Draft with an EAGLE-3 head that learns during training."""
    policy: str | None = None
    """Mode of speculation; None leaves it to the instances."""


class Screen:
    """Display of finished steps and of the progress of the present one; without a terminal, one line per step."""

    def __init__(self, console: Console, options: Options) -> None:
        self._console = console
        self._options = options
        self._records: list[StepRecord] = []
        self._progress = Progress(
            TextColumn("{task.description:24}"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn()
        )
        self._task = self._progress.add_task("submitting", total=options.prompts * options.samples)
        self.live = Live(self._progress, console=console, refresh_per_second=4)

    def watch(self, step: int, finished: int, total: int) -> None:
        """Show that a sample has arrived."""
        doing = "rollout" if finished < total else "reward, learn, send"
        text = f"step {step}: {doing}"
        self._progress.update(self._task, description=text, completed=finished, total=total)

    def add(self, record: StepRecord) -> None:
        """Show that a step is finished."""
        self._records.append(record)
        if not self._console.is_terminal:
            cells = zip(_TIME_COLUMNS, _time_cells(record), strict=True)
            self._console.print("  ".join(f"{name} {cell}" for name, cell in cells), soft_wrap=True)
        last = len(self._records) == self._options.steps
        tables = step_tables(self._records)
        self._progress.reset(self._task, description=f"step {record.step + 1}: submitting")
        self.live.update(rich.Group(*tables, *([] if last else [self._progress])))


def step_tables(records: Sequence[StepRecord]) -> list[Table]:
    """Return a table of times and, if there were drafts or cached rollouts, a table of these."""
    tables = [_steps_table(_TIME_COLUMNS, map(_time_cells, records))]
    if any(record.drafted or record.cached or record.drafter_version for record in records):
        tables.append(_steps_table(_DRAFT_COLUMNS, map(_draft_cells, records)))
    return tables


def _steps_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _time_cells(record: StepRecord) -> list[str]:
    return [
        str(record.step),
        f"{record.reward:.3f}",
        str(record.tokens),
        "/".join(map(str, percentiles(record.lengths))),
        f"{record.timing.rollout:.2f}",
        f"{record.tokens_per_second:.0f}",
        " ".join(f"{seconds:.2f}" for seconds in record.bubbles.values()),
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
    setup.out.mkdir(parents=True, exist_ok=True)
    console.print(f"Starting {setup.instances} instances of {setup.model} and a gateway ...")
    config = PlatformConfig(
        model=setup.model.absolute(),
        instances=setup.instances,
        device=setup.device,
        folder=setup.out,
        learner=setup.learner,
        learner_options=LEARNER_OPTIONS,
        instance_options=(f"--dtype={setup.dtype}", *setup.instance_options),
    )
    tell = partial(console.print, markup=False, highlight=False)
    with Platform(config, report=tell) as platform, platform.client() as client:
        ready = time.monotonic()
        console.print(f"Gateway on {platform.gateway_address}; ready after {ready - began:.0f} s.")
        device = client.instances()[0].device
        with DecisionWatch(platform.client()) as watch:
            if setup.policy is not None:
                set_mode(client, setup.policy)
            records, kept = _train(client, setup, options, console)
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
    client: Client, setup: Setup, options: Options, console: Console
) -> tuple[list[StepRecord], SampledStep | None]:
    """Train; return the steps, and the last sampled step if plain decoding must give the same tokens."""
    learner = new_learner(setup.model, options)
    # The learner of the drafter reads the weights of a step from their folder after the step.
    weights = WeightFolder(setup.out / "weights", setup.model, keep=4) if setup.learner else None
    screen = Screen(console, options)
    records: list[StepRecord] = []
    kept: list[SampledStep] = []

    def keep(step: int, asked: Sequence[Group], samples: Sequence[Sample], seconds: float) -> None:
        if step == options.steps - 1 and options.exactness is ExactnessLevel.EXACT:
            kept.append(SampledStep.of(learner.model, step, asked, samples, seconds))

    run_id = f"{setup.curriculum.name}-{time.time_ns():x}"
    with client.run(run_id, seed=options.seed, weights=weights) as run, screen.live:
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
        f"\nReward {summary['reward_first']:.3f} in the first step, {summary['reward_last']:.3f} in the last; "
        f"{summary['samples']} samples, {summary['tokens']} tokens, "
        f"{summary['tokens_per_second']:.0f} tokens/s; {summary['wall_seconds']:.0f} s in all.",
        soft_wrap=True,
    )
    if summary["plainly"] is not None:
        console.print(str(PlainComparison(**summary["plainly"])), soft_wrap=True)
    console.print(f"Report: {summary['report']}", soft_wrap=True)


def read_arguments(arguments: Sequence[str] | None) -> tuple[Setup, Options]:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog="paceline demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--instances", type=int, help="default: one for each GPU, or two without")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--model",
        default=str(MODEL),
        help="model folder in Hugging Face layout, organization/name on the hub, or smollm2",
    )
    parser.add_argument("--dtype", default="float32", help="of the instances: float32, bfloat16 or auto")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the results")
    parser.add_argument("--policy", choices=POLICIES, help="how the platform speculates (default: planner)")
    parser.add_argument(
        "--learner", action="store_true", help="draft with an EAGLE-3 head that learns during training"
    )
    parser.add_argument(
        "--instance-option",
        action="append",
        default=[],
        help="more flags for instances, e.g. --max-num-seqs=64",
    )
    add_options(parser)
    given = parser.parse_args(arguments)
    options = tuple(given.instance_option)
    on_gpus = driver_gpus() if chooses_cuda(given.device, driver_gpus()) else 0
    model = local_model(given.model, lambda line: print(f"model: {line}", flush=True))
    curriculum = curriculum_of(model)
    setup = Setup(
        model=model,
        curriculum=curriculum,
        instances=given.instances or on_gpus or 2,
        device=given.device,
        dtype=given.dtype,
        out=given.out,
        instance_options=options,
        learner=given.learner,
        policy=given.policy,
    )
    return setup, read_options(given, usual_options(curriculum))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit status."""
    try:
        setup, options = read_arguments(arguments)
    except (DownloadError, SourceError, OSError, ValueError) as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 1
    console = Console()
    warnings.simplefilter("ignore", SyntaxWarning)  # of packages that reasoning-gym imports
    try:
        summary = run_demo(setup, options, console)
    except PlatformError as error:
        console.print(f"The platform failed: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    _link_latest(setup.out)
    _print_summary(summary, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
