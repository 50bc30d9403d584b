"""Replay a text: an engine does all of its work for a batch of samples, and every engine gets the same tokens.

Engines draw with different noise, so the same prompts would get other responses from each, and drafts another
acceptance. Here the logit of the text's next token is raised before an engine samples, until that token has all
probability. Every engine then samples, verifies and rejects with its own code, and accepts a draft iff it agrees
with the text.

The text is a function of the position alone. Prompts are its beginnings, of different lengths, behind a first token
of their own; so samples are at different places of it, and a row needs no more than its position, which the device
has. Nothing waits for the host, and the cost is one gather and one scatter of a number for each row.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from bench.gpu.engines.driving import StepWatch, StockVllm
from bench.gpu.sizes import EngineKind, TextDrift, reference_of
from services.contracts.sampling import Sampling
from services.generation.engine.types import EngineRequest

if TYPE_CHECKING:
    from services.generation.loop.sample_drafts import SampleDrafts
    from services.generation.speculation.drafter import DraftContext

_CERTAIN = 1e4
"""Logit of the text's token. Others are within some tens, so it has all probability in every number type."""
_serials = count()


class SteeredLogits:
    """Make the sampler of a worker of this process sample a text. It does nothing before `follow`."""

    def __init__(self, worker: Any) -> None:
        """Watch the runner for the positions of its rows, and change the logits that its model computes."""
        self._runner = worker.model_runner
        self._next: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        if hasattr(self._runner, "req_states"):
            self._watch_v2()
        else:
            self._watch_v1()
        model = self._runner.get_model()
        compute = model.compute_logits

        def compute_steered(*args: Any, **kwargs: Any) -> Any:
            return self._steer(compute(*args, **kwargs))

        model.compute_logits = compute_steered

    def follow(self, text: Sequence[int], longest: int) -> None:
        """Sample token `text[i]` at position i of every sequence, of at most `longest` tokens, from now on."""
        padded = [*text[1:], *[text[-1]] * (longest + 1 - len(text))]
        self._next = torch.tensor(padded, device=self._runner.device)

    def release(self) -> None:
        """Sample what the model says again."""
        self._next = None

    def _watch_v1(self) -> None:
        runner, prepare = self._runner, self._runner._prepare_inputs

        def prepared(*args: Any, **kwargs: Any) -> Any:
            made = prepare(*args, **kwargs)
            if self._next is not None:
                self._positions = runner.positions[made[0]]
            return made

        runner._prepare_inputs = prepared

    def _watch_v2(self) -> None:
        runner, sample = self._runner, self._runner.sample

        def sampled(hidden_states: torch.Tensor, input_batch: Any, *rest: Any) -> Any:
            if self._next is not None:
                self._positions = input_batch.positions[input_batch.logits_indices]
            return sample(hidden_states, input_batch, *rest)

        runner.sample = sampled

    def _steer(self, logits: Any) -> Any:
        positions = self._positions
        if self._next is None or positions is None or logits is None or len(positions) != len(logits):
            return logits
        return logits.scatter_(1, self._next[positions].unsqueeze(1), _CERTAIN)


@dataclass(frozen=True, slots=True)
class ReplayedSample:
    """A sample of a replay: the response that it will have, and a reference, empty if there is none."""

    name: str
    prompt: list[int]
    response: list[int]
    reference: list[int]


def samples_of(
    text: Sequence[int], number: int, shortest: int, tokens: int, vocabulary: int, drift: TextDrift | None
) -> list[ReplayedSample]:
    """Return samples of `tokens` tokens whose prompts have `shortest` tokens to nearly twice as many.

    No two of a process begin with the same token, or a later one would find its KV in the prefix cache.
    """
    found = []
    for i in range(number):
        begin, serial = shortest + i * shortest // number, next(_serials)
        response = list(text[begin : begin + tokens])
        reference = [] if drift is None else reference_of(response, vocabulary, drift, seed=i)
        prompt = [3 + serial % (vocabulary - 3), *text[1:begin]]
        found.append(ReplayedSample(f"r{serial}", prompt, response, reference))
    return found


def instance_drafts(engine: Any, kind: EngineKind, mode: str, sweep_seconds: float) -> SampleDrafts:
    """Return the drafters and the planner of an instance with the default configuration, for an idle engine."""
    from prometheus_client import CollectorRegistry

    from services.generation.build import build_drafts
    from services.generation.config import GenerationConfig
    from services.generation.loop.metrics import EngineMetrics

    settings: dict[str, Any] = {
        "model": str(kind),
        "speculation": mode,
        "sweep_seconds": sweep_seconds,
        "engine": "v2" if kind in (EngineKind.V2, EngineKind.AHEAD) else "v1",
        "schedule_ahead": kind is EngineKind.AHEAD,
    }
    metrics = EngineMetrics(CollectorRegistry())
    return build_drafts(GenerationConfig(**settings), engine, metrics, lambda _: None)


def replay(
    engine: Any, watch: StepWatch, samples: Sequence[ReplayedSample], drafts: SampleDrafts | None
) -> dict[str, Any]:
    """Generate the samples, whose text the engine follows; return the figures.

    `seconds` last from the first sample's arrival to the last token; the figures of steps leave prefill out.

    Raises:
        RuntimeError: a token differs from the text.
    """
    run = _ReplayRun(engine, samples, drafts)
    began = time.perf_counter()
    run.enter()
    while not all(run.responses.values()):
        if not engine.has_work:
            raise RuntimeError("the batch ended before all of its samples had begun")
        run.step()
    prefilled = time.perf_counter()
    watch.begin()
    run.forget_steps()
    while engine.has_work:
        run.step()
    wrong = sum(
        own != token
        for each in samples
        for own, token in zip(run.responses[each.name], each.response, strict=True)
    )
    if wrong:
        raise RuntimeError(f"{wrong} of {run.tokens} tokens are not the text's")
    return {
        "seconds": run.ended - began,
        "prefill_seconds": prefilled - began,
        "tokens_a_second": run.tokens / (run.ended - began),
        "tokens_a_step": run.tokens / run.outcomes,
        "steps": len(run.seconds),
        "step_ms": 1000 * median(run.seconds),
        "decision_ms": None if drafts is None else 1000 * median(run.deciding),
        "drafted": run.verified["drafted"],
        "accepted": run.verified["accepted"],
        **watch.figures(),
    }


class _ReplayRun:
    """One batch in an engine. `seconds` and `deciding` have the times of steps, and of decisions before them.

    `ended` is the end of the last step with a token; `outcomes` counts the samples of each step that had one.
    """

    def __init__(self, engine: Any, samples: Sequence[ReplayedSample], drafts: SampleDrafts | None) -> None:
        self._engine, self._samples, self._drafts = engine, samples, drafts
        self.responses: dict[str, list[int]] = {each.name: [] for each in samples}
        self.seconds: list[float] = []
        self.deciding: list[float] = []
        self.verified: Counter[str] = Counter()
        self.outcomes = 0
        self.ended = self._stepped_at = 0.0

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return sum(map(len, self.responses.values()))

    def enter(self) -> None:
        """Queue the samples."""
        for seed, each in enumerate(self._samples):
            if isinstance(self._engine, StockVllm):
                self._engine.add(each.name, each.prompt, len(each.response))
                continue
            sampling = Sampling(max_tokens=len(each.response), ignore_eos=True)
            self._engine.add(EngineRequest(each.name, tuple(each.prompt), (), sampling, seed))
            if self._drafts is not None and self._drafts.speculation is not None:
                self._drafts.speculation.begin(_context(each, seed))

    def forget_steps(self) -> None:
        """Count only later steps."""
        self.seconds.clear()
        self.deciding.clear()

    def step(self) -> None:
        """Decide about drafts, and run a step, as the loop of an instance does."""
        began = time.perf_counter()
        if self._drafts is not None:
            self._drafts.put(self._engine)
        put, in_flight = time.perf_counter(), getattr(self._engine, "in_flight", 0)
        outcome = self._engine.step()
        ended = time.perf_counter()
        self.deciding.append(put - began)
        self.seconds.append(ended - began)
        if self._drafts is not None:
            self._drafts.stepped(ended - (self._stepped_at if in_flight else put), self._engine.in_flight)
        self._stepped_at = ended
        if outcome:
            self.ended = ended
        for each in outcome:
            response = self.responses[each.sample_id]
            response += each.token_ids
            self.outcomes += bool(each.token_ids)
            if self._drafts is not None:
                self._learn(each, response, in_flight)

    def _learn(self, step: Any, response: Sequence[int], later: int) -> None:
        assert self._drafts is not None
        self._drafts.learn([step], later)
        self.verified.update(drafted=step.drafted, accepted=step.accepted)
        if step.finish is not None:
            self._drafts.end(step.sample_id, response)


def _context(sample: ReplayedSample, seed: int) -> DraftContext:
    from services.contracts.rollout import RolloutKind
    from services.generation.speculation.drafter import DraftContext

    return DraftContext(
        sample.name,
        sample.prompt,
        sample.reference,
        prompt_id=sample.name,
        run_id="replay",
        seed=seed,
        source=RolloutKind.PREGENERATED.value,
    )
