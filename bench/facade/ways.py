"""Fetch the same samples in several ways: by gRPC, and in each dialect of the facade."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from paceline import AsyncClient, Group, Sample, SampleKey, SampleRequest, SamplingParams
from services.facade.dialects.body import prompt_id_of

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
