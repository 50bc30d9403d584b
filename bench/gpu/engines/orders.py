"""Carry out orders in a process that has an engine. Each order returns JSON data for the state."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from bench.gpu.engines.driving import (
    BatchDriver,
    DraftGiving,
    Driven,
    DrivenBatch,
    StepWatch,
    StockVllm,
    drafts_of,
    watched,
)
from bench.gpu.engines.replay import SteeredLogits, instance_drafts, replay, samples_of
from bench.gpu.sizes import EngineKind, Graphs, TextDrift, TextRepeats, text_of
from bench.worker import UncountedDrafts
from services.contracts.sampling import Sampling
from services.generation.engine.experiments.trees.tree import forked
from services.generation.engine.types import EngineRequest

if TYPE_CHECKING:
    from services.generation.loop.sample_drafts import SampleDrafts

_SPARE = 8
"""Extra tokens around the timed steps: for the first steps, and for steps in flight at the end."""
_PROFILED = 5
_SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    {"temperature": 0.9, "min_p": 0.05},
    {"repetition_penalty": 1.2, "presence_penalty": 0.4},
)
_LONGEST_PROMPT = 200


class EngineOrders:
    """An engine and the watch over its worker."""

    def __init__(self, engine: Any, named: tuple[EngineKind, Graphs]) -> None:
        """Watch an engine; `named` has the kind and the graphs that results are labelled with."""
        self._engine, self._named = engine, named
        self._watch: StepWatch = watched(engine._core)
        # Made when they are first needed.
        self._steered: SteeredLogits | None = None
        self._drafts: SampleDrafts | None = None

    def tokens(
        self,
        count: int,
        tokens: int,
        drafts: int,
        wrong: float,
        truth: dict[str, list[int]] | None,
        trees: bool = False,
    ) -> dict[str, Any]:
        """Generate samples with several samplings; return tokens and log-probabilities by the sample's number.

        With `drafts` they verify that many tokens of the truth in each step, a share `wrong` of which is wrong.
        With `trees` the drafts are trees in which each draft has a wrong token as a sibling branch. RuntimeError if
        the engine refuses trees.
        """
        engine, random = self._engine, Random(7)
        if trees and engine.form is None:
            raise RuntimeError("the engine refuses draft trees; its log says why")
        engine.forget_kv()
        found: dict[str, dict[str, list[Any]]] = {"tokens": {}, "logprobs": {}}
        names = {f"t{drafts}-{wrong}-{bool(truth)}-{trees}-{i}": str(i) for i in range(count)}
        for name, number in names.items():
            vocab = engine.limits.vocab_size
            prompt = tuple(random.randrange(3, vocab) for _ in range(random.randrange(8, _LONGEST_PROMPT)))
            own = _SAMPLINGS[int(number) % len(_SAMPLINGS)]
            sampling = Sampling(max_tokens=tokens, ignore_eos=True, **own)
            engine.add(EngineRequest(name, prompt, (), sampling, random.getrandbits(64)))
            found["tokens"][number], found["logprobs"][number] = [], []
        accepted = steps = 0
        truths = {name: truth[number] for name, number in names.items()} if truth else {}
        while engine.has_work:
            if truth:
                given = drafts_of(engine, truths, drafts, wrong, random)
                engine.put_drafts(_forked(engine, given) if trees else given)
            steps += 1
            for step in engine.step():
                number = names[step.sample_id]
                found["tokens"][number] += step.token_ids
                found["logprobs"][number] += step.logprobs
                accepted += step.accepted
        return {**found, "accepted": accepted, "steps": steps}

    def cell(
        self, rows: int, context: int, steps: int, drafts: Sequence[tuple[int, float]]
    ) -> dict[str, Any]:
        """Time steps of `rows` samples: plainly, and with drafts for each (length, share of wrong ones).

        All runs have the same prompts, and later runs reuse the KV of the first.
        """
        about = {"engine": list(self._named), "rows": rows, "context": context}
        longest = max((length for length, _ in drafts), default=0)
        batch = DrivenBatch(rows, context, steps * (longest + 1) + (longest + 1) * _SPARE)
        if (needed := rows * (context + batch.tokens)) > self._engine.kv_capacity:
            return {
                **about,
                "skipped": f"{needed} tokens do not fit the KV cache of {self._engine.kv_capacity}",
            }
        plain = self._driven(batch, DraftGiving(), batch.tokens if drafts else steps)
        found = [{"drafts": 0, "wrong": 0.0, **plain[1]}]
        for length, wrong in drafts:
            giving = DraftGiving(length, wrong, plain[0].responses)
            found.append({"drafts": length, "wrong": wrong, **self._driven(batch, giving, steps)[1]})
        self._forget()
        return {**about, "runs": found}

    def replay(
        self,
        samples: int,
        prompt: int,
        tokens: int,
        repeats: TextRepeats,
        drift: TextDrift | None,
        mode: str,
        sweep_seconds: float,
    ) -> dict[str, Any]:
        """Generate a given text with `samples` samples of `tokens` tokens (replay.py); return the figures.

        With a `drift` the engine drafts as an instance does, with references that differ so from the text.
        """
        about = {
            "engine": list(self._named),
            "samples": samples,
            "tokens": tokens,
            "repeats": asdict(repeats),
            "drift": None if drift is None else asdict(drift),
        }
        engine, length = self._engine, 2 * prompt + tokens
        if (needed := samples * length) > engine.kv_capacity:
            return {**about, "skipped": f"{needed} tokens do not fit the KV cache of {engine.kv_capacity}"}
        stock = isinstance(engine, StockVllm)
        vocabulary = engine.vocab_size if stock else engine.limits.vocab_size
        if drift is not None and self._drafts is None:
            self._drafts = instance_drafts(engine, self._named[0], mode, sweep_seconds)
        if self._steered is None:
            (self._steered,) = engine._core.collective_rpc(SteeredLogits)
        text = text_of(length, vocabulary, repeats, seed=1)
        self._steered.follow(text, engine.max_model_len if stock else engine.limits.max_model_len)
        batch = samples_of(text, samples, prompt, tokens, vocabulary, drift)
        found = replay(engine, self._watch, batch, None if drift is None else self._drafts)
        self._steered.release()
        self._forget()
        return {**about, **found}

    def passes(self, rows: Sequence[int], context: int) -> dict[str, Any]:
        """Time drafting by the engine's draft model, launched kernel by kernel: milliseconds by rows and tokens."""
        (drafts,) = self._engine.model_drafts.values()
        drafts.begin()
        while not drafts.build(1.0):
            pass
        found = []
        for count in rows:
            batch = DrivenBatch(count, context, 4 * _SPARE)
            driver = BatchDriver(self._engine, batch, DraftGiving())
            driver.enter()
            names = [state.sample_id for state in self._engine.decoding()]
            for tokens in (1, drafts.most_tokens):
                # The first call processes the tokens that were decoded without it.
                taken = [self._drafting(drafts, names, tokens) for _ in range(1 + _PROFILED)][1:]
                found.append({"rows": count, "tokens": tokens, "ms": _ms(taken)})
            driver.leave()
        self._forget()
        return {"bytes": drafts.nbytes, "passes": found}

    def waits(self, rows: int, context: int, length: int) -> dict[str, Any]:
        """Count the host's waits in a step, by the place in the source, and the copies of a step."""
        batch = DrivenBatch(rows, context, 16 * (length + 1) * _SPARE)
        truth = {} if not length else self._driven(batch, DraftGiving(), batch.tokens)[0].responses
        driver = BatchDriver(self._engine, batch, DraftGiving(length, 0.0, truth))
        driver.enter()
        places = _waits(driver)
        copies = _copies(driver)
        driver.leave()
        self._forget()
        return {"drafts": length, "waits": places, "copies": copies}

    def deciding(self, rows: int, context: int, length: int) -> dict[str, Any]:
        """Time an instance's work on the host for the drafts of a step: states, proposals, plan, hand-over."""
        from services.generation.drafters.reference.drafter import ReferenceDrafter
        from services.generation.speculation.drafter import DraftContext
        from services.generation.speculation.plan import FixedLengthPlanner
        from services.generation.speculation.speculation import Speculation

        engine, batch = self._engine, DrivenBatch(rows, context, 16 + _SPARE)
        speculation = Speculation(
            [ReferenceDrafter()], FixedLengthPlanner(length), engine.limits.vocab_size, UncountedDrafts()
        )
        driver = BatchDriver(engine, batch, DraftGiving())
        driver.enter()
        for state in engine.decoding():
            guess = [3] * batch.tokens
            speculation.begin(DraftContext(state.sample_id, tuple(state.prompt), guess))
        found = driver.run_with(lambda: engine.put_drafts(speculation.drafts(engine.decoding(), 1 << 20)), 16)
        driver.leave()
        self._forget()
        return {"rows": rows, "decision_ms": _ms(found.drafting), "step_ms": _ms(found.seconds)}

    def memory(self) -> dict[str, Any]:
        """Return memory in bytes, and the captured graphs."""
        from vllm.compilation.counter import compilation_counter

        engine = self._engine
        found: dict[str, Any] = {
            "kv_tokens": engine.kv_capacity,
            "graphs_captured": compilation_counter.num_cudagraph_captured,
            "attention": getattr(engine, "attention", "vllm's"),
            "failed_kernels": list(getattr(engine, "failed_kernels", ())),
        }
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            found |= {
                "allocated": torch.cuda.memory_allocated(),
                "reserved": torch.cuda.memory_reserved(),
                "peak": torch.cuda.max_memory_allocated(),
                "free": free,
                "total": total,
            }
        return found

    def _drafting(self, drafts: Any, names: Sequence[str], tokens: int) -> float:
        began = time.perf_counter()
        made = drafts.propose(dict.fromkeys(names, tokens))
        taken = time.perf_counter() - began
        if len(made.proposals) != len(names):
            raise RuntimeError(f"the draft model drafted for {len(made.proposals)} of {len(names)} samples")
        return taken

    def _forget(self) -> None:
        if not isinstance(self._engine, StockVllm):
            self._engine.forget_kv()

    def _driven(self, batch: DrivenBatch, drafts: DraftGiving, steps: int) -> tuple[Driven, dict[str, Any]]:
        driver = BatchDriver(self._engine, batch, drafts)
        driver.enter()
        self._watch.begin()
        found = driver.run(steps)
        seen = self._watch.figures()
        driver.leave()
        seconds = sum(found.seconds)
        figures = {
            "steps": len(found.seconds),
            "step_ms": _ms(found.seconds),
            "tokens_a_second": found.tokens / seconds if seconds else None,
            "tokens_a_step": found.tokens / len(found.seconds) / batch.rows if found.seconds else None,
            **seen,
        }
        return found, figures


def _forked(engine: Any, drafts: dict[str, list[int]]) -> dict[str, Sequence[int]]:
    """Return trees of a draft and a wrong sibling token. Drafts without room stay chains."""
    vocab, rooms = engine.limits.vocab_size, {each.sample_id: each.room for each in engine.decoding()}
    own = {name: draft for name, draft in drafts.items() if len(draft) < rooms[name]}
    trees = {name: [(draft[0] + 1) % vocab, *draft] for name, draft in own.items()}
    parents = {name: [-1, -1, *range(1, len(draft))] for name, draft in own.items()}
    return forked({**drafts, **trees}, parents)


def _waits(driver: BatchDriver) -> dict[str, float]:
    """Return the number of waits in a step, by file and line; none without a device."""
    if not torch.cuda.is_available():
        driver.run(_PROFILED)
        return {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            driver.run(_PROFILED)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    seen = Counter(
        f"{each.filename}:{each.lineno}" for each in caught if "synchroniz" in str(each.message).lower()
    )
    return {place: times / _PROFILED for place, times in seen.most_common()}


def _copies(driver: BatchDriver) -> dict[str, float]:
    """Return copies and kernels of a step by kind, from the profiler; on a CPU its calls of copy_."""
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiled:
        driver.run(_PROFILED)
    kinds: Counter[str] = Counter()
    for event in profiled.events():
        name = str(event.name)
        if name.startswith("Memcpy"):
            kinds[" ".join(name.split()[:2])] += 1
        elif not cuda:
            kinds[name] += name == "aten::copy_"
        else:
            kinds["kernels"] += not name.startswith(("Memset", "cuda"))
    return {name: times / _PROFILED for name, times in kinds.most_common() if times}


def _ms(seconds: Sequence[float]) -> float | None:
    return 1000 * median(seconds) if seconds else None
