"""Measures what a second and a third branch would bring: how often they are right, and rollout time with them.

The runs are those of bench/mismatch, recorded now where they are not there. Drafters are asked at every position
of the samples behind their real tokens. Rollout times are by the planner's model of step times, on a sweep of this
machine with the subject, and on one of an 8B model on an H100 (services/simulator/device_tables.py): with a
prototype of trees, and with the services' own index, planner and trees. Writes runs/bench/branches.json.

    python -m bench.branches [--subjects tinymath tinymath-16m] [--rates 5e-5 1.5e-4 5e-4]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.branches import earlier_policy, suffixes, with_reference
from bench.branches.choices import BranchCounts, Choices, calibrated
from bench.branches.eagle3 import HeadChoices
from bench.branches.served import FLOORS, MOST, Device, decode_run
from bench.branches.trees import DraftedSample, DraftShape, decode
from bench.mismatch.arms import ARMS
from bench.mismatch.records import FOLDER, LEARNING_RATES, CountedRun, load_or_count
from bench.report import console, show_table, write
from bench.rollout.first_head import first_head
from bench.rollout.registry import REGIMES, SUBJECTS, Regime
from paceline import SampleKey
from services.generation.drafters.reference.drafter import ReferenceDrafter
from services.simulator.device_tables import H100, QWEN3_8B, decoding_table
from services.simulator.simulated_sweep import swept
from services.step_time.estimator import StepTimeEstimator
from services.step_time.saved_sweep import SavedSweep

FIRST = 2
"""Step from which samples count: prompts have a history then, and there is a policy before."""
SUFFIX, REFERENCE, HEAD, EARLIER = "suffix", "reference and suffix", "eagle3", "previous policy"
_CPU, _H100 = "this CPU", "8B on an H100"
_DEPTHS = {SUFFIX: 16, REFERENCE: 16, HEAD: 5, EARLIER: 16}
_RIGHT = (("first right", "first"), ("second, of mismatches", "second"), ("third, of mismatches", "third"))
_TIMES = (
    ("chain, of plain", "chain_of_plain"),
    ("two branches, of chain", "two_of_chain"),
    ("three, of chain", "three_of_chain"),
    ("rows a step, chain", "rows_chain"),
    ("three branches", "rows_three"),
    ("steps, of chain", "steps_of_chain"),
)
_SERVED = (
    ("one branch, of chain", "one_of_chain"),
    ("two, of chain", "two_of_chain"),
    (f"{MOST}, of chain", "most_of_chain"),
    ("rows a step, chain", "rows_chain"),
    (f"{MOST} branches", "rows_most"),
    ("steps, of chain", "steps_of_chain"),
)
Drafters = Mapping[str, Sequence[Mapping[SampleKey, Choices]]]
"""By drafter: the choices along the samples of each counted step."""


def main() -> None:
    """Record what is missing, ask the drafters, show and write."""
    warnings.simplefilter("ignore", SyntaxWarning)  # of packages that reasoning-gym imports
    given = _arguments()
    found: dict[str, Any] = {}
    for subject in given.subjects:
        head: Path | None = None
        for lr in given.rates:
            counted = load_or_count(subject, lr, _say)
            # The first step is the same at every rate.
            head = head or first_head(counted.run, counted.model, FOLDER / "heads")
            name = f"{subject}, learning rate {lr:g}"
            _say(f"{name}: asking the drafters")
            drafters = _drafters(counted, HeadChoices(counted.model, head))
            right = {each: _right(steps) for each, steps in drafters.items()}
            show_table(name, _RIGHT, right)
            found[name] = {"right": right, "times": _times(counted, drafters), "served": _served(counted)}
            show_table(name, _TIMES, found[name]["times"])
            show_table(f"{name}, by the services", _SERVED, found[name]["served"])
    write("branches", {**headline(found), "runs": found})


def headline(runs: Mapping[str, Any]) -> dict[str, float]:
    """Return rollout time with three branches, of that with chains: the worst over all runs, of lookups."""
    names = [
        f"{device}, {regime}, {drafter}"
        for drafter in (SUFFIX, REFERENCE)
        for device in (_CPU, _H100)
        for regime in REGIMES
    ]
    return {name: max(run["times"][name]["three_of_chain"] for run in runs.values()) for name in names}


def _drafters(counted: CountedRun, head: HeadChoices) -> Drafters:
    trajectory, reference = counted.trajectory, ReferenceDrafter()
    found: dict[str, list[Mapping[SampleKey, Choices]]] = {}
    for place in range(FIRST, len(trajectory.steps)):
        step = trajectory.steps[place]
        responses = {key: sample.token_ids.tolist() for key, sample in step.samples.items()}
        looked_up = _looked_up(counted, place)
        made = {
            SUFFIX: {key: suffixes.choices(looked_up[key], response) for key, response in responses.items()},
            REFERENCE: with_reference.choices(reference, counted.said[place][1], responses, looked_up),
        }
        for coupled in (True, False):
            name = "" if coupled else ", by probability"
            made[HEAD + name] = head.choices(step, place, coupled)
            made[EARLIER + name] = earlier_policy.choices(trajectory, place, coupled)
        for name, each in made.items():
            found.setdefault(name, []).append(each)
    return found


def _looked_up(counted: CountedRun, place: int) -> dict[SampleKey, list[suffixes.RankedTokens]]:
    """Return what the texts of each prompt say: earlier samples, and those that run beside."""
    steps, found = counted.trajectory.steps, dict[SampleKey, list[suffixes.RankedTokens]]()
    for group in steps[place].groups:
        earlier = [
            sample.token_ids.tolist()
            for step in steps[:place]
            for key, sample in step.samples.items()
            if key.prompt_id == group.prompt_id
        ]
        running = {
            key: sample.token_ids.tolist()
            for key, sample in steps[place].samples.items()
            if key.prompt_id == group.prompt_id
        }
        found |= suffixes.look_up([int(each) for each in group.prompt_token_ids], earlier, running)
    return found


def _right(steps: Iterable[Mapping[SampleKey, Choices]]) -> dict[str, float]:
    """Return how often each choice is right, at the first place of a draft."""
    branches = BranchCounts.of([each.ranks[0] for step in steps for each in step.values()])
    return {"first": branches.accepted, "second": branches.saved, "third": branches.saved_by_third}


def _times(counted: CountedRun, drafters: Drafters) -> dict[str, dict[str, float]]:
    """Return rollout times by device, regime and drafter."""
    h100 = decoding_table("8B H100", QWEN3_8B, H100)
    devices = (
        (_CPU, StepTimeEstimator(_measured_sweep(counted).steps), ()),
        (_H100, StepTimeEstimator(swept(h100, 512)), h100.graphs),
    )
    found = {}
    for drafter, steps in drafters.items():
        for regime in REGIMES.values():
            batches = [_batch(counted, FIRST + i, each, regime) for i, each in enumerate(steps)]
            for device, step_time, graphs in devices:
                depth = _DEPTHS[drafter.partition(",")[0]]
                decoded = [
                    [decode(batch, DraftShape(branches, depth), step_time, graphs) for batch in batches]
                    for branches in range(4)
                ]
                seconds = [sum(each.seconds for each in batches_of) for batches_of in decoded]
                steps_taken = [sum(each.steps for each in batches_of) for batches_of in decoded]
                rows = [sum(each.verified for each in batches_of) for batches_of in decoded]
                found[f"{device}, {regime.name}, {drafter}"] = {
                    "chain_of_plain": seconds[1] / seconds[0],
                    "two_of_chain": seconds[2] / seconds[1],
                    "three_of_chain": seconds[3] / seconds[1],
                    "rows_chain": rows[1] / steps_taken[1],
                    "rows_three": rows[3] / steps_taken[3],
                    "steps_of_chain": steps_taken[3] / steps_taken[1],
                }
    return found


def _served(counted: CountedRun) -> dict[str, dict[str, float]]:
    """Return rollout times by device, regime and drafter, with the services' own drafters and planner."""
    h100 = decoding_table("8B H100", QWEN3_8B, H100)
    cpu, gpu = StepTimeEstimator(_measured_sweep(counted).steps), StepTimeEstimator(swept(h100, 512))
    devices = {
        f"{name}, floor {floor}": Device(step_time, graphs, floor)
        for floor in FLOORS
        for name, step_time, graphs in ((_CPU, cpu, ()), (_H100, gpu, h100.graphs))
    }
    arms = {SUFFIX: "history", REFERENCE: "reference"}
    found = {}
    for drafter, arm_name in arms.items():
        arm = next(each for each in ARMS if each.name == arm_name)
        for regime in REGIMES.values():
            for name, device in devices.items():
                chain, *trees = (
                    decode_run(counted, arm, regime, device, branches, FIRST) for branches in (0, 1, 2, MOST)
                )
                best = trees[-1]
                found[f"{name}, {regime.name}, {drafter}"] = {
                    "one_of_chain": trees[0].seconds / chain.seconds,
                    "two_of_chain": trees[1].seconds / chain.seconds,
                    "most_of_chain": best.seconds / chain.seconds,
                    "rows_chain": chain.verified / chain.steps,
                    "rows_most": best.verified / best.steps,
                    "steps_of_chain": best.steps / chain.steps,
                }
    return found


def _batch(
    counted: CountedRun, place: int, step: Mapping[SampleKey, Choices], regime: Regime
) -> list[DraftedSample]:
    """Return the samples of a regime. Their probabilities are learned from the slots of the other parity."""
    prompts = {
        group.prompt_id: len(group.prompt_token_ids) for group in counted.trajectory.steps[place].groups
    }
    found = []
    for parity in (0, 1):
        mine = [key for key in step if key.slot % 2 == parity and key.slot < regime.samples]
        if mine:
            learned = [choices for key, choices in step.items() if key.slot % 2 != parity]
            asked = [_cut(step[key], regime.max_tokens) for key in mine]
            shares = calibrated(learned, asked)
            found += [
                DraftedSample(prompts[key.prompt_id], *each)
                for key, each in zip(mine, zip(asked, shares, strict=True), strict=True)
            ]
    return found


def _cut(choices: Choices, longest: int | None) -> Choices:
    end = None if longest is None else longest - 1
    return replace(choices, ranks=choices.ranks[:, :end], certainty=choices.certainty[:, :end])


def _measured_sweep(counted: CountedRun) -> SavedSweep:
    """Return the sweep of a subject on this machine, measured now if there is none."""
    folder = FOLDER / "sweeps" / counted.subject
    if not list(folder.glob("*.json")):
        _say(f"{counted.subject}: measuring step times")
        options = [f"--model={counted.model}", f"--out={folder}", "--dtype=float32"]
        subprocess.run([sys.executable, "-m", "paceline.cli", "calibrate", *options], check=True)
    (path,) = folder.glob("*.json")
    return SavedSweep.model_validate_json(path.read_text())


def _say(line: str) -> None:
    console().print(f"branches: {line}", highlight=False)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--subjects", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--rates", nargs="+", type=float, default=list(LEARNING_RATES))
    return parser.parse_args()


if __name__ == "__main__":
    main()
