"""Trainer of the chaos tests: a loop through the SDK, in a thread of its own, whose every sample is kept."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from paceline import Client, Group, PacelineError, Reward, Sample, SampleKey, SamplingParams, WeightFolder

LONG = SamplingParams(max_tokens=250, ignore_eos=True)
NATURAL = SamplingParams(max_tokens=250)
EPOCH = 3
"""Steps after which the same prompts come again, so that the rollouts before are drafts."""
_AGAIN_SECONDS = 0.2


def groups(step: int) -> list[Group]:
    """Return the prompts of a step: half of the samples have the same length, half end by themselves."""
    epoch = step % EPOCH
    return [
        Group(f"{epoch}-{n}", [3 + n, 20 + epoch, 5], samples=4, sampling=LONG if n % 2 else NATURAL)
        for n in range(6)
    ]


def expected(step: int) -> Counter[SampleKey]:
    """Return the names of the samples of a step, each once."""
    return Counter(
        SampleKey(group.prompt_id, slot) for group in groups(step) for slot in range(group.samples)
    )


@dataclass
class Step:
    """What a trainer got for one step."""

    number: int
    version: int
    seconds: float
    samples: list[Sample] = field(default_factory=list)

    @property
    def tokens(self) -> dict[SampleKey, list[int]]:
        """The tokens of each sample."""
        return {sample.key: sample.token_ids.tolist() for sample in self.samples}


class Trainer:
    """One run: pushes weights, announces the next step, requests the samples of this one and rewards them.

    The weights of a step are a function of its number, so that a run has the same ones whatever happens in it.
    """

    def __init__(self, client: Client, run_id: str, seed: int, model: Path, folder: Path) -> None:
        self.steps: list[Step] = []
        self.pushes_repeated = 0
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self.doing = ""
        """What the step waits for."""
        self.doing_since = time.monotonic()
        self._model: dict[str, Any] = load_file(model / "model.safetensors")
        self._client = client
        self._run = client.run(run_id, seed=seed, weights=WeightFolder(folder, model))
        self._most: int | None = None
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._train, name=f"trainer of {run_id}", daemon=True)

    @property
    def samples(self) -> int:
        """Samples of the steps that are complete."""
        return sum(len(step.samples) for step in self.steps)

    def start(self, steps: int | None = None) -> None:
        """Begin; `steps` of them, or until `finish`."""
        self._most = steps
        self._thread.start()

    def finish(self) -> None:
        """Let the step that has begun be the last one."""
        self._enough.set()

    def _train(self) -> None:
        try:
            while not self._enough.is_set() and len(self.steps) != self._most:
                self._step(len(self.steps))
        except BaseException as error:
            self.error = error
        finally:
            self.ended.set()

    def _step(self, number: int) -> None:
        began = time.monotonic()
        version = self._push(number)
        self._do("hint")
        self._run.hint(number + 1, groups(number + 1), policy_version=version + 1)
        self._do("submit")
        rollout = self._run.rollout(number, groups(number), policy_version=version)
        step = Step(number, version, 0.0)
        for sample in rollout:
            step.samples.append(sample)
            self._do(f"sample {len(step.samples) + 1} of {len(rollout)}")
        self._do("rewards")
        rewards = [Reward(s.key.prompt_id, s.key.slot, float(len(s.token_ids) % 2)) for s in step.samples]
        self._run.report_rewards(rollout.batch.batch_id, rewards)
        step.seconds = time.monotonic() - began
        self.steps.append(step)

    def _do(self, what: str) -> None:
        self.doing, self.doing_since = what, time.monotonic()

    def _push(self, number: int) -> int:
        """Publish the weights of a step and return their version.

        A fleet of which no instance is left can take no weights, which the trainer is told: it tries again.
        """
        factor = 1.0 + 0.03 * (number % 5)
        tensors = {name: tensor * tensor.dtype.type(factor) for name, tensor in self._model.items()}
        self._do("push")
        while True:
            try:
                return self._run.push_weights(tensors).policy_version
            except PacelineError as error:
                print(f"  push of step {number}: {error}", flush=True)
                self.pushes_repeated += 1
                time.sleep(_AGAIN_SECONDS)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the samples of a run differ from those of another one."""

    samples: int = 0
    differing_tokens: int = 0
    lost: int = 0
    doubled: int = 0
    failed: int = 0
    """Samples that are neither complete nor ended by their length."""
    wrong_version: int = 0
    """Samples of which a token is of another version than the step's."""


def compare(steps: Sequence[Step], reference: Sequence[Step]) -> Comparison:
    """Compare all samples of the same steps, token for token."""
    found: Counter[str] = Counter()
    for step, other in zip(steps, reference, strict=True):
        wanted, got = expected(step.number), Counter(sample.key for sample in step.samples)
        found["samples"] += len(step.samples)
        found["lost"] += (wanted - got).total()
        found["doubled"] += (got - wanted).total()
        for sample in step.samples:
            found["failed"] += sample.status not in ("completed", "truncated")
            found["wrong_version"] += {s.policy_version for s in sample.version_spans} != {step.version}
            found["differing_tokens"] += differing(sample.token_ids.tolist(), other.tokens[sample.key])
    return Comparison(**found)


def differing(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the number of places at which two responses differ."""
    unequal = sum(a != b for a, b in zip(left, right, strict=False))
    return unequal + abs(len(left) - len(right))
