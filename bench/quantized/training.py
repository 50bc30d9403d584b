"""A GRPO run in one process, every token of it drafted by the quantized copy, which is renewed after each update.

Measured are the share of drafted tokens that the target samples too, the time to quantize the weights again, and
the speed against plain decoding of the last step's samples, with the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.model_drafting import DraftedSamples, in_own_process, roll
from bench.report import Figures, console
from services.contracts.sampling import Sampling
from services.generation.engine.types import QUANTIZED, EngineOptions, EngineRequest, W4Options

MODEL = Path("examples/tinymath/model")


@dataclass(frozen=True, slots=True)
class Given:
    """Options of the benchmark: length of the run, and how the quantized copy is made and used."""

    steps: int = 8
    prompts: int = 8
    samples: int = 4
    max_tokens: int = 320
    group: int = 32
    depth: int = 5
    model: Path = MODEL


def measure(given: Given = Given()) -> Figures:
    """Return the figures of a training run, in a process of its own."""
    return in_own_process(_run, given)


def _run(given: Given) -> Figures:
    """Train, drafting with the quantized copy."""
    from services.generation.engine.core import Engine

    engine = Engine(
        EngineOptions(
            model=str(given.model),
            dtype="float32",
            max_num_seqs=given.prompts * given.samples,
            kv_cache_memory_bytes=1 << 29,
            quantized=W4Options(given.group, given.depth),
        )
    )
    # Imported after vLLM, which takes the process's threads as it finds them.
    from examples.tinymath import tokenizer
    from examples.tinymath.grpo import GrpoSample
    from examples.tinymath.train import Options, new_learner, plan

    options = Options(steps=given.steps, prompts=given.prompts, pool=given.prompts, samples=given.samples)
    learner = new_learner(given.model, options)
    rows, refreshes, last = [], [], (DraftedSamples(), DraftedSamples())
    for step, problems in enumerate(plan(options)):
        prompts = [tokenizer.prompt_ids(problem.question) for problem in problems]
        requests = [
            EngineRequest(
                f"{step}/{i}/{slot}", tuple(prompt), (), Sampling(max_tokens=given.max_tokens), seed
            )
            for i, prompt in enumerate(prompts)
            for slot in range(given.samples)
            for seed in [(step << 32) + (i << 16) + slot]
        ]
        drafted = roll(engine, requests, QUANTIZED, given.depth)
        if step + 1 == given.steps:
            last = (roll(engine, requests), drafted)
        rewards, lessons = [], []
        for request in requests:
            place = int(request.sample_id.split("/")[1])
            tokens, logprobs = drafted.tokens[request.sample_id], drafted.logprobs[request.sample_id]
            rewards.append(problems[place].reward(tokenizer.decode(tokens)))
            lessons.append(GrpoSample(problems[place].id, prompts[place], tokens, logprobs, rewards[-1]))
        rows.append(_row(step, drafted, rewards))
        console().print(f"quantized: step {step + 1} of {given.steps} is drafted", highlight=False)
        learner.step(lessons)
        engine.apply_weights(learner.model.state_dict().items())
        refreshes.append(_refresh(engine))
    return _figures(given, rows, refreshes, last, engine.model_drafts[QUANTIZED].nbytes)


def _figures(
    given: Given,
    rows: list[dict[str, Any]],
    refreshes: Sequence[float],
    last: tuple[DraftedSamples, DraftedSamples],
    quantized_bytes: int,
) -> Figures:
    """Return the figures of a run; `last` is its last step, decoded plainly and with drafts."""
    plain, fast = last
    compared, accepted = (sum(row[name] for row in rows) for name in ("compared", "accepted"))
    return {
        "self_w4_acceptance": accepted / compared,
        "block_efficiency": 1 + accepted / sum(row["verifications"] for row in rows),
        "group": given.group,
        "depth": given.depth,
        "refresh_seconds": median(refreshes),
        "quantized_bytes": quantized_bytes,
        "same_tokens": plain.tokens == fast.tokens,
        "steps_vs_plain": fast.steps / plain.steps,
        "speed_vs_plain": plain.seconds / fast.seconds,
        "draft_step_ms": 1e3 * median(fast.draft_seconds),
        "verify_step_ms": 1e3 * median(fast.step_seconds),
        "plain_step_ms": 1e3 * median(plain.step_seconds),
        "trajectory": rows,
    }


def _refresh(engine: Any) -> float:
    """Make the quantized copy anew; seconds that it took."""
    began = time.perf_counter()
    while not engine.model_drafts[QUANTIZED].build(0.0):
        pass
    return time.perf_counter() - began


def _row(step: int, rolled: DraftedSamples, rewards: Sequence[float]) -> dict[str, Any]:
    return {
        "step": step,
        "reward": sum(rewards) / len(rewards),
        "tokens": sum(map(len, rolled.tokens.values())),
        "acceptance": rolled.acceptance,
        "by_place": rolled.by_place,
        "block_efficiency": rolled.block_efficiency,
        "verifications": rolled.verifications,
        "compared": rolled.compared,
        "accepted": rolled.accepted,
    }
