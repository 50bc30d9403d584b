"""Drafts of the quantized copy on the tinymath model while it is trained: their worth, and where they would pay.

A GRPO run in one process, every token of it drafted by the quantized copy. Measured are the share of drafted tokens
that the target samples too, the time to quantize the weights again after each update, and the speed against plain
decoding, with the same tokens. On this kind of machine the copy cannot be faster: a step of so small a model is
Python and kernel launches, and a draft step has as many of them as the target's. Where it pays on a GPU is
therefore predicted, by tables of step times and the code that decides in an instance. Writes runs/bench/w4.json.

    python -m bench.w4 [--steps 8] [--group 32] [--depth 5]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.report import Figures, cores, show, show_rows, write
from services.contracts.sampling import Sampling
from services.generation.engine.types import QUANTIZED, EngineOptions, EngineRequest, W4Options
from services.generation.speculation.draft_lengths import DraftableBatch, choose_lengths
from services.simulator.device_tables import H100, H200, QWEN3_8B, decoding_table
from services.simulator.simulated_sweep import swept
from services.step_time.estimator import StepTimeEstimator

MODEL = Path("examples/tinymath/model")
_ANSWER_SECONDS = 1800
_NOTE = (
    "self_w4_acceptance: of the drafted tokens that were compared with the target's, the share that agreed, over"
    " the whole run. speed_vs_plain is of the last step's samples and is expected to be below 1 here: the model is"
    " bound by overhead. gpu is predicted, not measured."
)
# Bytes of a weight of the copy, with the scale that 128 of them share.
_W4_BYTES = 0.5 + 2 / 128
_GPUS = {"H100 SXM": H100, "H200": H200}
# Bytes that a 4-bit kernel seems to move for each that it does: dequantising costs, and the kernels differ.
_W4_OVERHEAD = 1.25
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


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


@dataclass(slots=True)
class _Rolled:
    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    verifications: int = 0
    compared: int = 0
    accepted: int = 0
    steps: int = 0
    seconds: float = 0.0
    draft_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)


def measure(given: Given = Given()) -> Figures:
    """Return the figures of a training run, in a process of its own: vLLM allows one engine in each."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, given), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_ANSWER_SECONDS):
            raise TimeoutError("the run does not end")
        found: Figures = ours.recv()
    except EOFError:
        raise RuntimeError("the process of the run died; what it wrote above says why") from None
    finally:
        process.join(20)
        process.kill()
    return found


def _answer(pipe: Any, given: Given) -> None:
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(cores()[-1]),
        "HF_HUB_OFFLINE": "1",
    }
    pipe.send(_run(given))


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
    rows, refreshes, last = [], [], (_Rolled(), _Rolled())
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
        drafted = _roll(engine, requests, given.depth)
        if step + 1 == given.steps:
            last = (_roll(engine, requests, 0), drafted)
        rewards, lessons = [], []
        for request in requests:
            place = int(request.sample_id.split("/")[1])
            tokens, logprobs = drafted.tokens[request.sample_id], drafted.logprobs[request.sample_id]
            rewards.append(problems[place].reward(tokenizer.decode(tokens)))
            lessons.append(GrpoSample(problems[place].id, prompts[place], tokens, logprobs, rewards[-1]))
        rows.append(_row(step, drafted, rewards))
        learner.step(lessons)
        engine.apply_weights(learner.model.state_dict().items())
        refreshes.append(_refresh(engine))
    plain, fast = last
    compared, accepted = (sum(row[name] for row in rows) for name in ("compared", "accepted"))
    return {
        "self_w4_acceptance": accepted / compared,
        "block_efficiency": 1 + accepted / sum(row["verifications"] for row in rows),
        "group": given.group,
        "depth": given.depth,
        "refresh_seconds": median(refreshes),
        "quantized_bytes": engine.model_drafts[QUANTIZED].nbytes,
        "same_tokens": plain.tokens == fast.tokens,
        "steps_vs_plain": fast.steps / plain.steps,
        "speed_vs_plain": plain.seconds / fast.seconds,
        "draft_step_ms": 1e3 * median(fast.draft_seconds),
        "verify_step_ms": 1e3 * median(fast.step_seconds),
        "plain_step_ms": 1e3 * median(plain.step_seconds),
        "trajectory": rows,
    }


def _roll(engine: Any, requests: Sequence[EngineRequest], depth: int) -> _Rolled:
    """Generate samples, plainly or with `depth` tokens of the quantized copy for each in every step."""
    engine.forget_kv()
    found, began = _Rolled(), time.perf_counter()
    prefix = "drafted/" if depth else "plain/"
    for request in requests:
        own = {name: getattr(request, name) for name in EngineRequest.__slots__}
        engine.add(EngineRequest(**own | {"sample_id": prefix + request.sample_id}))
        found.tokens[request.sample_id], found.logprobs[request.sample_id] = [], []
    while engine.has_work:
        if depth:
            _draft(engine, depth, found)
        stepping = time.perf_counter()
        for step in engine.step():
            sample_id = step.sample_id.removeprefix(prefix)
            found.tokens[sample_id] += step.token_ids
            found.logprobs[sample_id] += step.logprobs
            if step.drafted:
                found.verifications += 1
                found.accepted += step.accepted
                # A sample that ends ended by an accepted token, or its last is the target's own.
                found.compared += step.accepted + (step.accepted < step.drafted and step.finish is None)
        found.step_seconds.append(time.perf_counter() - stepping)
        found.steps += 1
    found.seconds = time.perf_counter() - began
    return found


def _draft(engine: Any, depth: int, found: _Rolled) -> None:
    wanted = {state.sample_id: min(depth, state.room) for state in engine.decoding() if state.room > 0}
    began = time.perf_counter()
    made = engine.model_drafts[QUANTIZED].propose(wanted).proposals
    seconds = time.perf_counter() - began
    steps = max((len(proposal.tokens) for proposal in made.values()), default=0)
    found.draft_seconds += [seconds / max(steps, 1)] * steps
    engine.put_drafts({sample_id: proposal.tokens for sample_id, proposal in made.items()})


def _refresh(engine: Any) -> float:
    """Make the quantized copy anew; seconds that it took."""
    began = time.perf_counter()
    while not engine.model_drafts[QUANTIZED].build(0.0):
        pass
    return time.perf_counter() - began


def _row(step: int, rolled: _Rolled, rewards: Sequence[float]) -> dict[str, Any]:
    return {
        "step": step,
        "reward": sum(rewards) / len(rewards),
        "tokens": sum(map(len, rolled.tokens.values())),
        "acceptance": rolled.accepted / max(rolled.compared, 1),
        "block_efficiency": 1 + rolled.accepted / max(rolled.verifications, 1),
        "verifications": rolled.verifications,
        "compared": rolled.compared,
        "accepted": rolled.accepted,
    }


def predicted(acceptance: float, context: int = 4096, most: int = 16) -> list[dict[str, Any]]:
    """Return predictions of where the quantized copy of Qwen3-8B pays on a GPU: a row for each device and batch.

    `gain` is tokens a second over plain decoding with the best depth; depth 0: it does not pay. Every drafted token
    is accepted with probability `acceptance` if those before it were; samples have `context` tokens each.
    """
    rows = []
    for name, chip in _GPUS.items():
        target = decoding_table(name, QWEN3_8B, chip)
        drafter = decoding_table(name, QWEN3_8B, chip, weight_bytes=_W4_BYTES * _W4_OVERHEAD)
        for n in _BATCHES:
            nothing = np.zeros(n)
            batch = DraftableBatch(np.full(n, most), nothing, nothing, n * context)
            step_time, pass_time = StepTimeEstimator(swept(target, n)), StepTimeEstimator(swept(drafter, n))
            plain, drafting = (table.seconds(n, n, n * context) for table in (target, drafter))
            step_time.observe(n, n, n * context, plain)
            pass_time.observe(n, n, n * context, drafting)
            best = choose_lengths(batch, [acceptance] * most, step_time, pass_time, margin=0.02)
            rows.append(
                {
                    "gpu": name,
                    "batch": n,
                    "acceptance": acceptance,
                    "depth": int(best.tokens.max()),
                    "gain": best.gain,
                    "draft_over_target": drafting / plain,
                }
            )
    return rows


def main() -> None:
    """Measure, predict, show and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("steps", "prompts", "samples", "max_tokens", "group", "depth"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Given(), name))
    given = parser.parse_args()
    figures = dict(measure(Given(**vars(given))))
    rows = figures.pop("trajectory")
    show("The quantized copy on tinymath", figures)
    heads = ("step", "reward", "tokens", "acceptance", "block_efficiency")
    show_rows("While it is trained", heads, [[f"{row[head]:.4g}" for head in heads] for row in rows])
    gpu = predicted(round(figures["self_w4_acceptance"], 2)) + predicted(0.97)
    columns = ("gpu", "batch", "acceptance", "depth", "gain", "draft_over_target")
    table = [[f"{v:.3g}" if isinstance(v, float) else str(v) for v in map(row.get, columns)] for row in gpu]
    show_rows("Predicted: Qwen3-8B, bfloat16, 4096 tokens each", columns, table)
    write("w4", {**figures, "trajectory": rows, "gpu": gpu, "note": _NOTE})


if __name__ == "__main__":
    main()
