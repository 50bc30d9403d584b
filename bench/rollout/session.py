"""Run the planned cells of a subject: reuse the kept ones, measure the others, and report both."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from bench.report import say
from bench.rollout.cells import (
    AbsentReason,
    CellFolder,
    CellName,
    StepFigures,
    TableCell,
    cell_key,
    code_hash,
    planned,
    seconds_left,
)
from bench.rollout.measuring import measure
from bench.rollout.record import RecordedRun, first_head, load_or_record
from bench.rollout.registry import PLAIN, REGIMES, SYSTEMS, ComparedSystem, StockSystem, Subject
from bench.rollout.systems import System, plain_platform
from bench.rollout.table import rollout_seconds, update_of
from bench.rollout.training import TrainedStep

FOLDER = Path("runs/bench/rollout")
_LOCK = Path("requirements/cpu.lock")
"""Lock file that pins vLLM and all other imported packages."""
_BENCH = [Path(f"bench/{name}.py") for name in ("comparison", "scrape", "simulate/verification", "worker")]
_MEASURING = ("cells", "measuring", "modelled", "record", "replay", "stock_engine", "systems", "told_tokens")
_ROLLOUT = [Path(f"bench/rollout/{name}.py") for name in _MEASURING]
_MEASURED_TABLES = sorted(Path("services/simulator/measured").glob("*.json"))
_STOCK_CODE = [
    *_BENCH,
    *_MEASURED_TABLES,
    *_ROLLOUT,
    Path("services/generation/engine"),
    Path("services/contracts"),
    Path("services/simulator/device_tables.py"),
]
_PLATFORM_CODE = [*_BENCH, *_MEASURED_TABLES, *_ROLLOUT, Path("services"), Path("paceline"), Path("kernels")]


class BenchmarkError(RuntimeError):
    """A failure without which there is no table; the message says what failed."""


@dataclass(slots=True)
class CellSession:
    """A call of the benchmark for one subject. After `minutes` no further cell is begun."""

    subject: Subject
    systems: Sequence[str]
    regimes: Sequence[str]
    rounds: int
    instances: int
    minutes: float
    folder: Path = FOLDER
    began: float = field(default_factory=time.monotonic)
    left: int = 0
    """Cells that a later call must measure."""
    _taken: dict[CellName, float] = field(default_factory=dict)

    def run(self) -> list[TableCell]:
        """Return all available cells, in planned order. BenchmarkError without a subject or plain decoding."""
        place = self.folder / self.subject.name
        model, kept = subject_model(self.subject), CellFolder(place / "cells")
        run = self._recorded(model, place)
        names = planned(self.systems, self.regimes, self.rounds)
        found: dict[CellName, TableCell] = {}
        for name in names:
            key = self._key(name, run, found)
            cell = None if key is None else kept.find(name)
            if cell is not None:
                self._taken[name] = cell.seconds
            if cell is not None and cell.key == key and cell.absent is None:
                found[name] = cell
        for name in names:
            if name in found and found[name].key == self._key(name, run, found):
                continue
            if time.monotonic() - self.began > 60 * self.minutes:
                found.pop(name, None)
                self.left += 1
                continue
            found[name] = self._measured(name, run, model, found)
            kept.keep(found[name])
            self._tell(found[name], [each for each in names if each not in found])
        return list(found.values())

    def _recorded(self, model: Path, place: Path) -> RecordedRun:
        config = plain_platform(model, self.instances, place / "recording", self.subject.kv_bytes)

        def watch(step: TrainedStep) -> None:
            done = f"{step.step + 1} of {self.subject.options.steps} steps"
            say(
                f"rollout: recorded {done}, rollout {step.rollout_seconds:.2f} s, "
                f"update {step.update_seconds:.2f} s, reward {step.reward:.3f}, KL {step.moved_kl:.1e}"
            )

        return load_or_record(config, self.subject.options, place, watch)

    def _key(self, name: CellName, run: RecordedRun, found: dict[CellName, TableCell]) -> str | None:
        """Return the hash of all inputs of a cell; None while the trainer's time is not known."""
        setup = SYSTEMS[name.system].setup
        stock = isinstance(setup, StockSystem)
        parts = (_code(stock), _LOCK.read_text(), run.hash, self.instances)
        first = CellName(PLAIN, name.regime, 0)
        if not stock and first not in found:
            return None
        waited = None if stock else found[first].update_seconds
        return cell_key(*parts, setup, REGIMES[name.regime], waited)

    def _measured(
        self, name: CellName, run: RecordedRun, model: Path, found: dict[CellName, TableCell]
    ) -> TableCell:
        system, first = SYSTEMS[name.system], CellName(PLAIN, name.regime, 0)
        update_seconds = found[first].update_seconds if first in found and name != first else 0.0
        key, began = self._key(name, run, found), time.monotonic()
        assert key is not None, "plain decoding leads the plan"
        which = f"{name.regime}, {name.system}, round {name.round}"
        took = seconds_left([name], self._taken)
        say(f"rollout: {which} begins, about {took:.0f} s")
        steps, absent, why = self._tried(system, run, name, model, update_seconds)
        if absent is not None and name.system == PLAIN:
            raise BenchmarkError(f"plain decoding failed in {name.regime}: {why}")
        cell = TableCell(name, key, update_seconds, time.monotonic() - began, steps, absent, why)
        if name == first:
            # The first step has costs that no later step has.
            return TableCell(name, key, update_of(rollout_seconds(cell)), cell.seconds, steps)
        return cell

    def _tried(
        self, system: ComparedSystem, run: RecordedRun, name: CellName, model: Path, update_seconds: float
    ) -> tuple[tuple[StepFigures, ...], AbsentReason | None, str]:
        """Return the steps of a cell, or the reason for none. A failing system does not affect the others."""
        if missing := package_missing(system.setup):
            return (), AbsentReason.PACKAGE_MISSING, missing
        folder = self.folder / self.subject.name / "platform"
        try:
            setup, heads = system.setup, self.folder / self.subject.name / "heads"
            learns = isinstance(setup, System) and setup.learner
            steps = measure(
                setup,
                run.cut(REGIMES[name.regime]),
                model,
                self.instances,
                update_seconds,
                folder,
                _say_step,
                first_head(run, model, heads) if learns else None,
                self.subject.kv_bytes,
            )
        except Exception as error:
            return (), AbsentReason.FAILED, last_line(error)
        return steps, None, ""

    def _tell(self, cell: TableCell, left: Sequence[CellName]) -> None:
        self._taken[cell.name] = cell.seconds
        gone = time.monotonic() - self.began
        what = f"{rollout_seconds(cell):.2f} s a rollout" if cell.steps else cell.why
        which = f"{cell.name.regime}, {cell.name.system}, round {cell.name.round}"
        rest = f"{len(left)} cells left, about {seconds_left(left, self._taken):.0f} s"
        say(f"rollout: {which}: {what}; {cell.seconds:.0f} s. {gone:.0f} s gone, {rest}")


def _say_step(step: StepFigures) -> None:
    differing = f", {step.differing} samples differ" if step.differing else ""
    say(f"  step {step.step}, rollout {step.rollout_seconds:.2f} s{differing}")


@cache
def _code(stock: bool) -> str:
    """Return the hash of the code that stock engines, or a platform, run, as it was at the first call."""
    return code_hash(_STOCK_CODE if stock else _PLATFORM_CODE)


def last_line(error: BaseException) -> str:
    """Return the type of an error, and the last nonempty line of its message."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"


def package_missing(setup: object) -> str:
    """Build the packages that only this system needs; return the reason for a failure, or ""."""
    if not isinstance(setup, StockSystem) or setup.needs is None:
        return ""
    done = subprocess.run(["scripts/arctic"], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    return f"scripts/arctic failed: {(done.stderr or done.stdout).strip().rpartition(chr(10))[2]}"


def subject_model(subject: Subject) -> Path:
    """Return the model folder of a subject, and make the model if it is missing. BenchmarkError if that fails."""
    if subject.made_by and not (subject.model / "model.safetensors").is_file():
        say(f"rollout: making the model of {subject.name}, some minutes")
        if subprocess.run(subject.made_by, check=False).returncode:
            raise BenchmarkError(f"the model of {subject.name} could not be made")
    return subject.model
