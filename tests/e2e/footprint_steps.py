"""Steps of a trainer, and what the processes of its platform hold after each.

A step has samples with a hint of the next step, a few samples over HTTP, and a push of weights. Prompts come again,
as those of a data set do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import httpx
from safetensors.torch import load_file

from paceline import Group, Run, SamplingParams, WeightStream
from services.local import Platform
from tests.e2e.conftest import http_client
from tests.support.footprint import Record, footprints, keys

SAMPLES = 32


class Trainer:
    """A trainer that does one step after another."""

    def __init__(self, platform: Platform, *, prompts: int, tokens: int) -> None:
        """The data set has `prompts` prompts; each sample has `tokens` tokens."""
        self._platform = platform
        self._prompts = prompts
        self._sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        self._weights: dict[str, Any] = load_file(platform.config.model / "model.safetensors")
        self._stack = ExitStack()
        self._run: Run
        self._http: httpx.Client
        self.steps = 0

    def __enter__(self) -> Self:
        client = self._stack.enter_context(self._platform.client())
        self._run = self._stack.enter_context(client.run("footprint", seed=1, weights=WeightStream()))
        self._http = self._stack.enter_context(http_client(self._platform))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def step(self) -> None:
        """Do a step."""
        step, self.steps = self.steps, self.steps + 1
        rollout = self._run.rollout(step, self._groups(step), self._sampling)
        version = rollout.batch.policy_version + 1
        self._run.hint(step + 1, self._groups(step + 1), self._sampling, policy_version=version)
        assert sum(1 for _ in rollout) == SAMPLES
        body = {"prompt": [3, 4, 5 + step % 8], "n": 2, "max_tokens": 8, "ignore_eos": True}
        self._http.post("/v1/completions", json=body).raise_for_status()
        self._run.push_weights({name: tensor * (1 + 1e-6 * step) for name, tensor in self._weights.items()})

    def _groups(self, step: int) -> list[Group]:
        numbers = [(step * 8 + number) % self._prompts for number in range(8)]
        return [Group(f"p{number}", [3 + number % 60, 4, 5], SAMPLES // 8) for number in numbers]


def observe(
    step: Callable[[], object], platform: Platform, steps: int, tell: Callable[[Record], None]
) -> Record:
    """Call `step` `steps` times and return what was held after each call."""
    found = Record()
    for _ in range(steps):
        step()
        found.add(footprints(platform), keys(platform))
        tell(found)
    return found
