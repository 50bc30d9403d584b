"""The copy in an engine on this machine: what is accepted by format, and what drafting costs by product and mode.

One core, float32, one engine for all. Samples are those of a step of tinymath; all ways must give the same tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.model_drafting import DraftedSamples, roll
from bench.policy.rounds import IgnoredVerifications, RoundOrigin, planner_of, run_round
from bench.quantized import formats
from bench.report import console
from services.contracts.sampling import Sampling
from services.generation.engine.types import QUANTIZED, EngineOptions, EngineRequest, W4Options
from services.generation.speculation.speculation import Speculation

_KV_BYTES = 1 << 29
_MODES = (("fixed", 4), ("fixed", 8), ("toggle", 4), ("toggle", 8), ("planner", 8))
DEPTH = 8
"""Longest draft."""


@dataclass(frozen=True, slots=True)
class HereOptions:
    """Options: a model, and the samples that are decoded."""

    model: Path
    prompts: int
    samples: int
    max_tokens: int
    rounds: int


def measured(given: HereOptions, part: str) -> dict[str, Any]:
    """Return the figures of one of `PARTS`; to be called in a process of its own, which can have one engine."""
    engine = _engine(given)
    requests = _requests(given)
    found = _PARTS[part](engine, requests, given)
    engine.shutdown()
    return found


def _engine(given: HereOptions) -> Any:
    from services.generation.engine.core import Engine
    from services.generation.engine.startup import warm_up

    engine = Engine(
        EngineOptions(
            str(given.model),
            dtype="float32",
            max_num_seqs=given.prompts * given.samples,
            max_model_len=1024,
            kv_cache_memory_bytes=_KV_BYTES,
            enable_prefix_caching=False,
            quantized=W4Options(128, DEPTH),
        )
    )
    warm_up(engine)
    return engine


def _say(part: str) -> None:
    console().print(f"quantized: {part}", highlight=False)


def _requests(given: HereOptions) -> list[EngineRequest]:
    # Imported after vLLM, which takes the process's threads as it finds them.
    from examples.tinymath import tokenizer
    from examples.tinymath.train import Options, plan

    options = Options(steps=1, prompts=given.prompts, pool=given.prompts, samples=given.samples)
    return [
        EngineRequest(
            f"{i}/{slot}",
            tuple(tokenizer.prompt_ids(problem.question)),
            (),
            Sampling(max_tokens=given.max_tokens),
            (i << 16) + slot,
        )
        for i, problem in enumerate(next(plan(options)))
        for slot in range(given.samples)
    ]


def _refresh(engine: Any) -> float:
    """Make the copy anew; processor seconds that it took."""
    drafts = engine.model_drafts[QUANTIZED]
    drafts.forget()
    drafts.begin()
    began = time.process_time()
    while not drafts.build(0.0):
        pass
    return time.process_time() - began


def _formats(engine: Any, requests: list[EngineRequest], given: HereOptions) -> dict[str, Any]:
    plain = roll(engine, requests)
    rows = {}
    for rounding in formats.ROUNDINGS:
        _say(rounding.name)
        formats.put(engine, rounding.product)
        drafted = roll(engine, requests, QUANTIZED, DEPTH)
        rows[rounding.name] = _row(drafted, plain)
    formats.put(engine, None)
    return rows


def _products(engine: Any, requests: list[EngineRequest], given: HereOptions) -> dict[str, Any]:
    refresh = median(_refresh(engine) for _ in range(5))
    # Kernels are made for a number of rows when it first comes.
    roll(engine, requests)
    plain = roll(engine, requests)
    rows = {}
    for name, make in _MAKES.items():
        _say(name)
        formats.put(engine, make)
        roll(engine, requests, QUANTIZED, DEPTH)
        drafted = roll(engine, requests, QUANTIZED, DEPTH)
        rows[name] = {
            **_row(drafted, plain),
            "pass_ms": 1e3 * median(drafted.draft_seconds),
            "plain_step_ms": 1e3 * median(plain.step_seconds),
            "vs_plain": drafted.rate / plain.rate,
        }
    formats.put(engine, None)
    nbytes = engine.model_drafts[QUANTIZED].nbytes
    return {"rows": rows, "refresh_seconds": refresh, "quantized_bytes": nbytes}


_MAKES = {formats.OWN: None, formats.UNPACKED: formats.unpacked, formats.INT8: formats.int8}


def _row(drafted: DraftedSamples, plain: DraftedSamples) -> dict[str, Any]:
    return {
        "acceptance": drafted.acceptance,
        "block_efficiency": drafted.block_efficiency,
        "by_place": drafted.by_place,
        "compared": drafted.compared,
        "same_tokens": drafted.tokens == plain.tokens,
    }


def _modes(engine: Any, requests: list[EngineRequest], given: HereOptions) -> dict[str, Any]:
    """Return how fast modes are that decide step by step, over plain decoding, with each product."""
    from services.generation.engine.startup import measure_steps

    sweep = measure_steps(engine, clock=time.process_time)
    rows: dict[str, Any] = {}
    for product in (formats.OWN, formats.INT8):
        formats.put(engine, _MAKES[product])
        ways = {"plain": None} | {
            f"{mode} {cap}": partial(_speculation, engine, sweep, mode, cap) for mode, cap in _MODES
        }
        learned = {name: make() if make is not None else None for name, make in ways.items()}
        ratios: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(given.rounds + 1):
            seconds = {name: run_round(engine, requests, each) for name, each in learned.items()}
            for name, each in seconds.items():
                assert each.responses == seconds["plain"].responses, f"{name} gives other tokens"
                # In the first round modes know nothing of the copy.
                if turn:
                    ratios[name].append(seconds["plain"].seconds / each.seconds)
            _say(f"modes, {product}, round {turn + 1} of {given.rounds + 1}")
        rows[product] = {name: {"vs_plain": median(each), "rounds": each} for name, each in ratios.items()}
    formats.put(engine, None)
    return rows


def _speculation(engine: Any, sweep: Any, mode: str, cap: int) -> Speculation:
    from services.generation.drafters.draft_model import DraftModelDrafter

    planner = planner_of(sweep, mode, cap, RoundOrigin())
    drafter = DraftModelDrafter(engine.model_drafts[QUANTIZED], planner, clock=time.process_time)
    return Speculation(
        [drafter], planner, engine.limits.vocab_size, IgnoredVerifications(), time.process_time
    )


_PARTS = {"formats": _formats, "products": _products, "modes": _modes}
PARTS = tuple(_PARTS)
