"""Samples decoded by an engine with drafts of one of its draft models, of a fixed length: counts and times."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from bench.report import cores
from bench.training import TrainedStep
from services.contracts.sampling import Sampling
from services.generation.engine.types import EngineRequest


@dataclass(slots=True)
class DraftedSamples:
    """Samples of a round. Seconds are the process's own processor time, so that others take little part in it."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    verifications: int = 0
    offered: list[int] = field(default_factory=list)
    """By draft position, drafts whose tokens before it were all accepted, and that were compared there."""
    agreed: list[int] = field(default_factory=list)
    """By draft position, those of them whose token there was accepted."""
    steps: int = 0
    seconds: float = 0.0
    draft_seconds: list[float] = field(default_factory=list)
    """Of each pass of the draft model."""
    step_seconds: list[float] = field(default_factory=list)

    @property
    def accepted(self) -> int:
        """Draft tokens that were accepted."""
        return sum(self.agreed)

    @property
    def compared(self) -> int:
        """Draft tokens that were compared with the target's."""
        return sum(self.offered)

    @property
    def acceptance(self) -> float:
        """Share of the compared tokens that were accepted."""
        return self.accepted / max(self.compared, 1)

    @property
    def block_efficiency(self) -> float:
        """Tokens a verification, the target's own included."""
        return 1 + self.accepted / max(self.verifications, 1)

    @property
    def by_place(self) -> list[float]:
        """Acceptance by position, if all before it were accepted."""
        return [a / max(o, 1) for a, o in zip(self.agreed, self.offered, strict=True)]

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return sum(map(len, self.tokens.values())) / self.seconds


def requests_of(step: TrainedStep, max_tokens: int) -> list[EngineRequest]:
    """Return the samples of a recorded step as requests: the engine will give the same tokens again."""
    prompts = {group.prompt_id: tuple(int(each) for each in group.prompt_token_ids) for group in step.groups}
    return [
        EngineRequest(
            f"{key.prompt_id}/{key.slot}",
            prompts[key.prompt_id],
            (),
            Sampling(max_tokens=max_tokens),
            sample.seed,
        )
        for key, sample in step.samples.items()
    ]


def roll(engine: Any, requests: Sequence[EngineRequest], drafter: str = "", depth: int = 0) -> DraftedSamples:
    """Generate samples, plainly or with `depth` tokens of a draft model for each in every step."""
    engine.forget_kv()
    found = DraftedSamples(offered=[0] * depth, agreed=[0] * depth)
    prefix = f"{drafter}{depth}/"
    began = time.process_time()
    for request in requests:
        own = {name: getattr(request, name) for name in EngineRequest.__slots__}
        engine.add(EngineRequest(**own | {"sample_id": prefix + request.sample_id}))
        found.tokens[request.sample_id], found.logprobs[request.sample_id] = [], []
    while engine.has_work:
        if depth:
            _draft(engine, drafter, depth, found)
        stepping = time.process_time()
        for step in engine.step():
            sample_id = step.sample_id.removeprefix(prefix)
            found.tokens[sample_id] += step.token_ids
            found.logprobs[sample_id] += step.logprobs
            if step.drafted:
                _count(found, step.drafted, step.accepted, step.finish is not None)
        found.step_seconds.append(time.process_time() - stepping)
        found.steps += 1
    found.seconds = time.process_time() - began
    return found


def _count(found: DraftedSamples, drafted: int, accepted: int, ended: bool) -> None:
    found.verifications += 1
    for place in range(accepted):
        found.offered[place] += 1
        found.agreed[place] += 1
    # A sample that ends ended by an accepted token, or its last is the target's own.
    if accepted < drafted and not ended:
        found.offered[accepted] += 1


def _draft(engine: Any, drafter: str, depth: int, found: DraftedSamples) -> None:
    wanted = {state.sample_id: min(depth, state.room) for state in engine.decoding() if state.room > 0}
    began = time.process_time()
    made = engine.model_drafts[drafter].propose(wanted).proposals
    seconds = time.process_time() - began
    steps = max((len(proposal.tokens) for proposal in made.values()), default=0)
    found.draft_seconds += [seconds / max(steps, 1)] * steps
    engine.put_drafts({sample_id: proposal.tokens for sample_id, proposal in made.items()})


def same_as_recorded(step: TrainedStep, tokens: Mapping[str, Iterable[int]]) -> bool:
    """Return True if the samples have the tokens of the recorded step."""
    return all(
        list(tokens[f"{key.prompt_id}/{key.slot}"]) == sample.token_ids.tolist()
        for key, sample in step.samples.items()
    )


def in_own_process(function: Callable[..., Any], *given: Any) -> Any:
    """Call a function that starts an engine in a process of its own: vLLM allows one in each, on one core here."""
    own = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(cores()[-1]), "HF_HUB_OFFLINE": "1"}
    before = {name: os.environ.get(name) for name in own}
    # Before the process begins: it imports torch, which looks once.
    os.environ |= own
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(function, *given).result()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
