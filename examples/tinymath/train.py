"""A GRPO trainer on Paceline. It uses the platform only through the SDK.

    paceline up --model examples/tinymath/model --instances 2
    python -m examples.tinymath.train --address 127.0.0.1:7400

With `--model` in both commands, another model is trained on problems in words (word_problems.py).

A step submits a batch of groups, reads the samples as they finish, rewards them, learns, and pushes the weights.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import torch
import transformers

import paceline
from examples.tinymath.curriculum import TINYMATH, Curriculum, Task, curriculum_of
from examples.tinymath.grpo import GrpoLearner, GrpoReport, GrpoSample, GrpoSettings
from examples.tinymath.options import MODEL, Options, add_options, read_options, usual_options
from examples.tinymath.records import StepRecord, StepTiming, UpdateRecord, record_step
from examples.tinymath.text import TaskText
from paceline import Exactness, Group, Reward, Run, SamplingParams

_LOGITS = 1 << 27
"""Most logits of one forward pass of the update: half a gigabyte, which the backward pass needs thrice."""
Watch = Callable[[int, int, int], None]
"""Called with (step, finished, total) when a sample arrives; learning begins when finished == total."""
Sampled = Callable[[int, Sequence[Group], Sequence[paceline.Sample], float], None]
"""Called with (step, groups, samples, seconds) before the policy learns from the samples."""


def train(
    run: Run,
    learner: GrpoLearner,
    options: Options,
    watch: Watch = lambda *_: None,
    curriculum: Curriculum = TINYMATH,
    sampled: Sampled = lambda *_: None,
) -> Iterator[StepRecord]:
    """Train one step for each record that is taken from the iterator."""
    sampling = options.sampling
    schedule, text = list(plan(options, curriculum)), curriculum.text
    for step, problems in enumerate(schedule):
        began = time.monotonic()
        asked = groups(problems, options, text)
        rollout = run.rollout(step, asked, sampling, exactness=options.asked)
        version = rollout.batch.policy_version
        if step + 1 < len(schedule):
            coming = groups(schedule[step + 1], options, text)
            hint(run, step + 1, coming, sampling, version + 1, options.asked)
        samples = collect(rollout, partial(watch, step))
        rolled_out = time.monotonic()
        sampled(step, asked, samples, rolled_out - began)
        rewards = reward(problems, samples, text)
        report = learner.step(lessons(problems, samples, rewards, text))
        report_rewards(run, rollout.batch.batch_id, samples, rewards, report)
        learned = time.monotonic()
        run.push_weights(learner.model.state_dict())
        timing = StepTiming(rolled_out - began, learned - rolled_out, time.monotonic() - learned)
        fleet = [instance.instance_id for instance in run.client.instances()]
        outcome = UpdateRecord(report.reward, report.loss, report.kl, report.clipped_ratio)
        yield record_step(step, samples, outcome, timing, version, fleet)


def plan(options: Options, curriculum: Curriculum = TINYMATH) -> Iterator[list[Task]]:
    """Yield the tasks of each step: epoch after epoch over the pool."""
    pool = curriculum.draw(options.seed, max(options.pool, options.prompts))
    rng = Random(options.seed)
    queue: list[Task] = []
    for _ in range(options.steps):
        if len(queue) < options.prompts:
            queue = rng.sample(pool, len(pool))
        yield [queue.pop() for _ in range(options.prompts)]


def groups(problems: Sequence[Task], options: Options, text: TaskText = TINYMATH.text) -> list[Group]:
    """Return the batch of a step."""
    return [Group(p.id, text.prompt_ids(p.question), options.samples) for p in problems]


def hint(
    run: Run, step: int, groups: list[Group], sampling: SamplingParams, version: int, asked: Exactness
) -> None:
    """Announce the prompts of the next step, which idle instances may pre-generate."""
    with contextlib.suppress(paceline.UnimplementedError):
        run.hint(step, groups, sampling, policy_version=version, exactness=asked)


def collect(rollout: paceline.Rollout, watch: Callable[[int, int], None]) -> list[paceline.Sample]:
    """Return all samples of the batch in completion order. It leaves the cores to the engines meanwhile."""
    samples: list[paceline.Sample] = []
    for sample in rollout:
        if sample.status is paceline.SampleStatus.FAILED:
            raise RuntimeError(f"sample {sample.prompt_id}/{sample.slot} failed: {sample.error}")
        samples.append(sample)
        watch(len(samples), len(rollout))
    return samples


def reward(
    problems: Sequence[Task], samples: Sequence[paceline.Sample], text: TaskText = TINYMATH.text
) -> list[float]:
    """Return the verifier's score of each sample, in [0, 1]."""
    known = {problem.id: problem for problem in problems}
    return [known[s.prompt_id].reward(text.decode(s.token_ids.tolist())) for s in samples]


def report_rewards(
    run: Run, batch_id: str, samples: Sequence[paceline.Sample], rewards: Sequence[float], report: GrpoReport
) -> None:
    """Report rewards, which learning drafters use, and the policy's drift from its samples to the platform."""
    named = [Reward(s.prompt_id, s.slot, value) for s, value in zip(samples, rewards, strict=True)]
    with contextlib.suppress(paceline.UnimplementedError):
        run.report_rewards(batch_id, named, kl=report.kl, clip_fraction=report.clipped_ratio)


def lessons(
    problems: Sequence[Task],
    samples: Sequence[paceline.Sample],
    rewards: Sequence[float],
    text: TaskText = TINYMATH.text,
) -> list[GrpoSample]:
    """Return the learner's samples in the order of the problems, not in completion order.

    The order of problems is random, so that each update of the learner sees several families.
    """
    prompts = {problem.id: text.prompt_ids(problem.question) for problem in problems}
    place = {problem.id: i for i, problem in enumerate(problems)}
    scored = sorted(
        zip(samples, rewards, strict=True), key=lambda pair: (place[pair[0].prompt_id], pair[0].slot)
    )
    return [
        GrpoSample(s.prompt_id, prompts[s.prompt_id], s.token_ids.tolist(), s.logprobs.tolist(), value)
        for s, value in scored
    ]


def new_learner(model: Path, options: Options) -> GrpoLearner:
    """Return a learner on the weights of a model folder, in float32."""
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    settings = GrpoSettings(lr=options.lr)
    micro_tokens = min(settings.micro_tokens, max(512, _LOGITS // policy.config.vocab_size))
    return GrpoLearner(policy, replace(settings, micro_tokens=micro_tokens))


def main() -> None:
    """Train on a running platform, and print one line per step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--address", default="127.0.0.1:7400")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument(
        "--weights", type=Path, help="push through this folder, which instances must see, too"
    )
    parser.add_argument("--run-id", default=f"example-{time.time_ns():x}")
    add_options(parser)
    given = parser.parse_args()
    curriculum = curriculum_of(given.model)
    options = read_options(given, usual_options(curriculum))
    folder = paceline.WeightFolder(given.weights, given.model) if given.weights else None
    learner = new_learner(given.model, options)
    with (
        paceline.Client(given.address) as client,
        client.run(given.run_id, seed=options.seed, weights=folder) as run,
    ):
        for record in train(run, learner, options, curriculum=curriculum):
            rate = f"{record.tokens_per_second:.0f} tokens/s"
            print(
                f"step {record.step}  reward {record.reward:.3f}  {record.tokens} tokens  {rate}", flush=True
            )


if __name__ == "__main__":
    main()
