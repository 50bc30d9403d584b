"""Measure the overhead of HTTP over gRPC: the same samples by Generate calls, as a batch, and by each HTTP dialect.

Gateway, Redis, facade and one vLLM instance are real processes; nothing is simulated. The engine has the first core
to itself, and everything else shares the others. Every round runs each way once, in a rotating order and with the
round's seed, and all ways must return the same tokens. The first round warms up and is not counted. Writes
runs/bench/facade.json; `overhead_vs_grpc` is the median over the rounds of the slowest dialect's time divided by
the time of Generate calls.

    python -m bench.facade [--rounds 20] [--model DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.comparison import Comparison
from bench.intervals import median_interval
from bench.one_instance import one_instance, overhead_arguments, prompts
from bench.report import BenchProgress, Figures, say, show, show_table, write
from paceline import AsyncClient, Group, Sample, SampleKey, SampleRequest, SamplingParams
from services.facade.dialects.body import prompt_id_of
from services.local.platform import Platform

Tokens = dict[SampleKey, list[int]]
Way = Callable[[int], Awaitable[Tokens]]
"""Function that fetches the samples of a run seed."""


@dataclass(frozen=True, slots=True)
class FacadeWorkload:
    """Samples that every way fetches: `samples` of each prompt, at most `max_tokens` long, at temperature 1."""

    prompts: Sequence[list[int]]
    samples: int
    max_tokens: int


class Ways:
    """Clients of one platform."""

    def __init__(self, client: AsyncClient, http: httpx.AsyncClient, work: FacadeWorkload) -> None:
        self._client = client
        self._http = http
        self._work = work
        self._names = [prompt_id_of(prompt) for prompt in work.prompts]

    def all(self) -> dict[str, Way]:
        """Return the ways by name; the first is the baseline for the others."""
        return {
            "grpc": self.generate,
            "grpc_batch": self.batch,
            "http_vllm": self.completions,
            "http_tokens": self.tokens,
            "http_sglang": self.sglang,
        }

    async def generate(self, seed: int) -> Tokens:
        """Make a Generate call for each sample, as the facade does."""
        sampling = SamplingParams(max_tokens=self._work.max_tokens)

        async def one(name: str, prompt: list[int], slot: int) -> tuple[SampleKey, list[int]]:
            request = SampleRequest("grpc", name, prompt, slot=slot, sampling=sampling, run_seed=seed)
            async for event in self._client.generate(request):
                if isinstance(event, Sample):
                    return event.key, event.token_ids.tolist()
            raise RuntimeError("a stream ended without its sample")

        return dict(await self._each(one))

    async def batch(self, seed: int) -> Tokens:
        """Submit one batch, as a trainer that uses the SDK does."""
        pairs = zip(self._names, self._work.prompts, strict=True)
        groups = [Group(name, prompt, self._work.samples) for name, prompt in pairs]
        async with self._client.run(f"bench-{seed}", seed=seed) as run:
            rollout = await run.rollout(0, groups, SamplingParams(max_tokens=self._work.max_tokens))
            return {sample.key: sample.token_ids.tolist() async for sample in rollout}

    async def completions(self, seed: int) -> Tokens:
        """Send one request to /v1/completions for all prompts, as TRL's client does."""
        body = {
            "prompt": self._work.prompts,
            "n": self._work.samples,
            "seed": seed,
            "max_tokens": self._work.max_tokens,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        choices = (await self._post("/v1/completions", body))["choices"]
        keys = [SampleKey(name, slot) for name in self._names for slot in range(self._work.samples)]
        return {key: choice["token_ids"] for key, choice in zip(keys, choices, strict=True)}

    async def tokens(self, seed: int) -> Tokens:
        """Send a request to /inference/v1/generate for each prompt."""

        async def one(name: str, prompt: list[int]) -> Tokens:
            params = {
                "n": self._work.samples,
                "seed": seed,
                "max_tokens": self._work.max_tokens,
                "logprobs": 1,
            }
            body = {"token_ids": prompt, "sampling_params": params}
            choices = (await self._post("/inference/v1/generate", body))["choices"]
            return {SampleKey(name, slot): choice["token_ids"] for slot, choice in enumerate(choices)}

        return await self._each_prompt(one)

    async def sglang(self, seed: int) -> Tokens:
        """Send a request to /generate for each prompt."""

        async def one(name: str, prompt: list[int]) -> Tokens:
            params = {"n": self._work.samples, "sampling_seed": seed, "max_new_tokens": self._work.max_tokens}
            body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
            answers: Any = await self._post("/generate", body)
            return {SampleKey(name, slot): answer["output_ids"] for slot, answer in enumerate(answers)}

        return await self._each_prompt(one)

    async def _each(
        self, one: Callable[[str, list[int], int], Awaitable[tuple[SampleKey, list[int]]]]
    ) -> list[tuple[SampleKey, list[int]]]:
        return await asyncio.gather(
            *(
                one(name, prompt, slot)
                for name, prompt in zip(self._names, self._work.prompts, strict=True)
                for slot in range(self._work.samples)
            )
        )

    async def _each_prompt(self, one: Callable[[str, list[int]], Awaitable[Tokens]]) -> Tokens:
        pairs = zip(self._names, self._work.prompts, strict=True)
        found: Tokens = {}
        for tokens in await asyncio.gather(*(one(name, prompt) for name, prompt in pairs)):
            found |= tokens
        return found

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        # Each way has a separate run. Otherwise it would draft from the identical samples of another way.
        headers = {"X-Paceline-Run": path.strip("/").replace("/", "-")}
        response = await self._http.post(path, json=body, headers=headers)
        return response.raise_for_status().json()


_GOAL = 1.15
_COLUMNS = (
    ("seconds", "seconds"),
    ("vs grpc", "ratio"),
    ("from", "ratio_low"),
    ("to", "ratio_high"),
    ("facade, ms a sample", "facade_ms_per_sample"),
)


def main() -> None:
    """Measure the ways, then show and write the figures."""
    given = arguments()
    options = one_instance(given.model, Path("runs/bench/facade"), bubbles=False, http_port=0)
    work = FacadeWorkload([*prompts(given.prompts).values()], given.samples, given.max_tokens)
    with Platform(options, report=say) as platform:
        figures = asyncio.run(_measure(platform, work, given.rounds))
    ways = show_table("facade: the same samples, seconds a round", _COLUMNS, figures["ways"])
    show("facade", {name: value for name, value in figures.items() if name != "ways"})
    write("facade", {**figures, "tables": {"ways": ways}})


async def _measure(platform: Platform, work: FacadeWorkload, rounds: int) -> Figures:
    (facade,) = [child for child in platform.processes if child.spec.name == "facade"]
    process = psutil.Process(facade.pid)
    comparison = Comparison()
    headers = {"Authorization": f"Bearer {platform.config.token}"}
    async with (
        AsyncClient(platform.gateway_address) as client,
        httpx.AsyncClient(base_url=platform.http_address, headers=headers, timeout=600) as http,
    ):
        ways = Ways(client, http, work).all()
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        busy = dict.fromkeys(ways, 0.0)
        progress = BenchProgress(rounds + 1, "facade")
        for number in range(rounds + 1):
            # Each way takes each place in the order equally often.
            place = number % len(ways)
            order = [*ways][place:] + [*ways][:place]
            found = {}
            for name in order:
                cpu, started = _cpu_seconds(process), time.perf_counter()
                found[name] = await ways[name](number)
                if number:
                    seconds[name].append(time.perf_counter() - started)
                    busy[name] += _cpu_seconds(process) - cpu
            for name in ways:
                comparison.add(f"{name}, round {number}", found["grpc"], found[name])
            progress.advance(f"round {number + 1} of {rounds + 1}")
    return figures_of(work, seconds, busy, comparison)


def figures_of(
    work: FacadeWorkload, seconds: dict[str, list[float]], busy: dict[str, float], comparison: Comparison
) -> Figures:
    samples = len(work.prompts) * work.samples
    ways = {}
    for name, taken in seconds.items():
        ratios = [own / base for own, base in zip(taken, seconds["grpc"], strict=True)]
        interval = median_interval(ratios)
        ways[name] = {
            "seconds": statistics.median(taken),
            "ratio": interval.median,
            "ratio_low": interval.low,
            "ratio_high": interval.high,
            "facade_ms_per_sample": 1000 * busy[name] / len(taken) / samples,
        }
    return {
        "overhead_vs_grpc": max(way["ratio"] for name, way in ways.items() if name.startswith("http")),
        "goal": _GOAL,
        "samples": samples,
        "rounds": len(seconds["grpc"]),
        "tokens_compared": comparison.compared,
        "tokens_that_differ": comparison.differing,
        "simulated": "nothing",
        "ways": ways,
    }


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def arguments() -> argparse.Namespace:
    """Parse the options."""
    return overhead_arguments(__doc__, 20)


if __name__ == "__main__":
    main()
