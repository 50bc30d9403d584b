"""Prepare the subject of the benchmark on disk: a run, samples of its first policy, and a head warmed up on them.

Each part is made once, and an interrupted call resumes with the missing part. Runs of all seeds share the first
policy, its samples and the head.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.learner.following import RecordedRollouts
from bench.report import say
from bench.rollout.systems import plain_platform
from bench.rollout.training import Trajectory
from examples.tinymath import tokenizer
from examples.tinymath.options import Options
from examples.tinymath.tasks import PRACTICE, load_problem, make_problems
from examples.tinymath.train import collect, groups
from paceline import SamplingParams
from services.contracts.drafter_checkpoint import folder_of
from services.drafter.learning.data import LearningSettings, TrainingSample
from services.local import Platform

_WARM_UP_SEED = 977
"""Seed of the warm-up problems, which differ from the problems of the run."""
_WARM_UP_PROMPTS = 64
_PASSES = 100


@dataclass(frozen=True, slots=True)
class LearnerSubject:
    """A model, its run, other samples of its first policy, and the head that all followers begin with."""

    model: Path
    folder: Path
    trajectory: Trajectory
    first: tuple[TrainingSample, ...]
    head: Path
    """Folder of the head that all followers begin with."""
    followed: Path
    """Folder for the results of this run's followers that begin with that head."""
    warmed: dict[str, Any]

    @property
    def drafter(self) -> Path:
        """The checkpoint that all followers begin with."""
        return folder_of(self.head, 1)


def first_samples(model: Path, folder: Path, options: Options, instances: int) -> tuple[TrainingSample, ...]:
    """Return samples of the first policy, of problems that are not in the run."""
    path = folder / "samples.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        say(f"learner: {_WARM_UP_PROMPTS * options.samples} samples of the first policy")
        asked = groups(make_problems(_WARM_UP_SEED, _WARM_UP_PROMPTS, PRACTICE), options)
        told = {group.prompt_id: [int(each) for each in group.prompt_token_ids] for group in asked}
        sampling = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
        with (
            Platform(plain_platform(model, instances, folder / "platform"), report=say) as platform,
            platform.client() as client,
            client.run("warm-up", seed=options.seed) as run,
        ):
            samples = collect(run.rollout(0, asked, sampling), lambda *_: None)
        rows = [[each.prompt_id, each.slot, each.seed, each.token_ids.tolist()] for each in samples]
        part = path.with_suffix(".part")
        part.write_text("".join(json.dumps([told[row[0]], *row]) + "\n" for row in sorted(rows)))
        part.replace(path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return tuple(
        rollout(prompt_id, slot, seed, tokens, prompt, 0, None)
        for prompt, prompt_id, slot, seed, tokens in rows
    )


def rollout(
    prompt_id: str,
    slot: int,
    seed: int,
    tokens: Iterable[int],
    prompt: Iterable[Any],
    step: int,
    reward: float | None,
) -> TrainingSample:
    """Return a sample of the run in the learner's form."""
    return TrainingSample(
        run_id="trajectory",
        batch_id=str(step),
        prompt_id=prompt_id,
        slot=slot,
        policy_version=step,
        prompt=tuple(int(token) for token in prompt),
        response=tuple(tokens),
        reward=reward,
        seed=seed,
    )


def warmed_up(
    model: Path,
    head: Path,
    samples: Sequence[TrainingSample],
    settings: LearningSettings,
    seconds: float,
    threads: int,
) -> dict[str, Any]:
    """Train the head that all followers begin with, if there is none, and return its figures."""
    figures = head / "warm-up.json"
    if figures.exists():
        known: dict[str, Any] = json.loads(figures.read_text())
        return known
    import torch
    import transformers

    from services.drafter.learning.learner import Learner
    from services.drafter.warmup import split, warm_up

    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    learner = Learner(model, settings)
    learned, held = split(samples, 0.1, seed=0)
    lengths, began = list[float](), time.perf_counter()
    for passed in warm_up(learner, learned, held, [1.0] * len(learned), passes=_PASSES, seconds=seconds):
        lengths.append(passed.evaluation.acceptance_length)
        gone = time.perf_counter() - began
        say(
            f"warm-up: pass {passed.number}, acceptance length {lengths[-1]:.3f}; {gone:.0f} s gone, "
            f"about {max(seconds - gone, 0):.0f} s left"
        )
        if passed.is_best:
            learner.save(head, 1)
    found = {
        "acceptance_length": max(lengths),
        "by_pass": lengths,
        "tokens": sum(each.drafted for each in learned),
        "seconds": time.perf_counter() - began,
    }
    figures.write_text(json.dumps(found))
    return found


def recorded_steps(trajectory: Trajectory) -> list[RecordedRollouts]:
    """Return the steps of a run in the followers' form, with the reward of each sample."""
    steps = trajectory.steps
    # No rollout follows the last step, so nothing can hide its update.
    following = [after.rollout_seconds for _, after in pairwise(steps)] + [0.0]
    found = []
    for place, (step, next_rollout) in enumerate(zip(steps, following, strict=True)):
        prompts = {group.prompt_id: group.prompt_token_ids for group in step.groups}
        rollouts = tuple(
            rollout(
                sample.prompt_id,
                sample.slot,
                sample.seed,
                sample.token_ids.tolist(),
                prompts[key.prompt_id],
                place,
                load_problem(key.prompt_id).reward(tokenizer.decode(sample.token_ids.tolist())),
            )
            for key, sample in step.samples.items()
        )
        window = step.update_seconds + step.push_seconds + next_rollout
        found.append(RecordedRollouts(place, step.weights, rollouts, window))
    return found
