"""A GRPO trainer on Paceline. It uses the platform only through the SDK.

    paceline up --model examples/tinymath/model --instances 2
    python -m examples.tinymath.train --address 127.0.0.1:7400

With `--model` in both commands, another model is trained on problems in words (word_problems.py).

A step submits a batch of groups, reads the samples as they finish, rewards them, learns, and pushes the weights.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

import torch
import transformers

import paceline
from examples.tinymath.curriculum import TINYMATH, Curriculum, Task, curriculum_of
from examples.tinymath.grpo import GrpoLearner, GrpoReport, GrpoSample, GrpoSettings
from examples.tinymath.records import StepRecord, StepTiming, UpdateRecord, record_step
from examples.tinymath.text import TaskText
from paceline import Exactness, ExactnessLevel, Group, Reward, Run, SamplingParams

MODEL = Path(__file__).parent / "model"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a training run: length, problems and sampling."""

    steps: int = 10
    prompts: int = 16
    """Groups of a step."""
    samples: int = 8
    """Samples of a group."""
    pool: int = 16
    """Number of problems; each epoch has them in a new order. If it equals `prompts`, steps are comparable."""
    max_tokens: int = 800
    temperature: float = 1.0
    lr: float = 5e-4
    threads: int = 1
    """CPU threads of the update; more are useful for a larger model, or if the engines leave cores free."""
    seed: int = 0
    exactness: ExactnessLevel = ExactnessLevel.EXACT
    """Use of rollouts of earlier steps: exact, coupled_history or lenient."""
    lenience: float = round(math.exp(0.5), 3)
    """The l of lenient: a cached token is kept with probability min(1, l * p_now / p_then)."""

    def __post_init__(self) -> None:
        for name in ("steps", "prompts", "samples", "pool", "max_tokens", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; must be at least 1")
        if not 0 <= self.lr < math.inf:
            raise ValueError(f"--lr is {self.lr}; must be at least 0 and finite")

    @property
    def asked(self) -> Exactness:
        """The exactness of every batch."""
        lenient = self.exactness is ExactnessLevel.LENIENT
        return Exactness(self.exactness, self.lenience if lenient else None)

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of every batch."""
        return SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens)


WORDS_OPTIONS = Options(
    steps=4, prompts=8, samples=4, pool=8, max_tokens=400, temperature=0.7, lr=1e-5, threads=2
)
"""Options of a short run on problems in words with a model of some 100 million parameters."""
_LOGITS = 1 << 27
"""Most logits of one forward pass of the update: half a gigabyte, which the backward pass needs thrice."""
_EXACTNESS = (ExactnessLevel.EXACT, ExactnessLevel.COUPLED_HISTORY, ExactnessLevel.LENIENT)

_METAVARS = {int: "N", float: "X"}

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


def usual_options(curriculum: Curriculum) -> Options:
    """Return the default options for a curriculum."""
    return Options() if curriculum is TINYMATH else WORDS_OPTIONS


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each field of `Options`."""
    for name, value in asdict(Options()).items():
        words = getattr(WORDS_OPTIONS, name)
        also = "" if words == value else f"; {words} for problems in words"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(value),
            metavar=_METAVARS.get(type(value)),
            choices=_EXACTNESS if isinstance(value, ExactnessLevel) else None,
            help=f"default: {value}{also}",
        )


def read_options(given: argparse.Namespace, usual: Options = Options()) -> Options:
    """Return the given options, and defaults for the others."""
    found = {name: getattr(given, name) for name in asdict(usual)}
    return replace(usual, **{name: value for name, value in found.items() if value is not None})


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
