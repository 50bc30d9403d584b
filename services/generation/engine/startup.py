"""Run an idle engine before it serves: warm it up, check its drafts, and measure its step times."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf
from random import Random
from statistics import median
from typing import TYPE_CHECKING

from services.contracts.sampling import Sampling
from services.generation.engine.model_support import Feature
from services.generation.engine.types import EngineRequest, SampleStep, Verifier
from services.step_time.sweep import SWEEP_SECONDS, MeasuredStep, SweptBatch, swept_batches

if TYPE_CHECKING:
    from services.generation.engine.core import Engine

_log = logging.getLogger(__name__)

# -- warm-up ----------------------------------------------------------------------------------------------

_WARM_UP_PROMPT = 8
_WARM_UP_RESPONSE = 4


def warm_up(engine: Engine) -> None:
    """Generate a few tokens at batch 1, a middle size and the largest, then forget their KV.

    vLLM's first run of every shape is seconds slow. Masks, penalties and proposals are included, because a device
    compiles the sampler's kernels for each of them at its first use.
    """
    plain = Sampling(max_tokens=_WARM_UP_RESPONSE, ignore_eos=True)
    masked = replace(plain, top_k=5, top_p=0.9, min_p=0.01)
    penalised = replace(plain, presence_penalty=0.5)
    length = min(_WARM_UP_PROMPT, engine.limits.max_model_len - _WARM_UP_RESPONSE)
    own, proposing = Verifier.COUPLED, Verifier.REJECTION
    batches = [(1, plain, own), (2, penalised, own), (8, masked, own), (64, plain, own)]
    batches += [(3, plain, proposing), (4, penalised, proposing)]
    for batch, sampling, verifier in batches:
        for i in range(batch):
            prompt = tuple((i + j) % engine.limits.vocab_size for j in range(length))
            engine.add(EngineRequest(f"warm-up-{batch}-{i}", prompt, (), sampling, i, verifier=verifier))
        while engine.has_work:
            for drafts in engine.model_drafts.values():
                drafts.propose({state.sample_id: 1 for state in engine.decoding()})
            engine.step()
    engine.forget_kv()


# -- check of drafts --------------------------------------------------------------------------------------

TOLERANCES = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.25}
"""By dtype of the model, in nats. float16 has eight times the precision of bfloat16, but its mixtures of experts
have near-ties as well."""
_COARSEST = max(TOLERANCES.values())
# Among fewer positions, a single one could be the median.
_LEAST_POSITIONS = 3
# About fifteen steps for each way of decoding: half a second on a 70B model.
_SAMPLES, _PROMPT_TOKENS, _TOKENS, _LIKELIEST = 4, 24, 12, 20
_DRAFT_TOKENS = 3
# A model with a shorter context has no room for a refused draft and tokens after it.
_SHORTEST = 12
# Spreads the tokens of prompts over the vocabulary.
_STRIDE = 7919


@dataclass(frozen=True, slots=True)
class Decoded:
    """Response of a sample, and the likeliest tokens of each position with their log-probabilities."""

    tokens: list[int] = field(default_factory=list)
    likeliest: list[Mapping[int, float]] = field(default_factory=list)


def disagreement(plain: Sequence[Decoded], drafted: Sequence[Decoded], dtype: str) -> str:
    """Return how drafted responses differ from plain ones beyond rounding; "" if they do not.

    Args:
        plain: responses of the samples, decoded without drafts.
        drafted: responses of the same samples, with a draft refused in their first decoding step.
        dtype: dtype of the model.
    """
    tolerance = TOLERANCES.get(dtype, _COARSEST)
    distances = [_distances(*both) for both in zip(plain, drafted, strict=True)]
    # A defect may affect one row of the batch, or end all responses at once.
    judged = [each for each in distances if len(each) >= _LEAST_POSITIONS]
    worst = max((median(each) for each in (*judged, list(chain(*distances))) if each), default=inf)
    if worst <= tolerance:
        return ""
    if worst == inf:
        return "other tokens are the likeliest after a refused draft"
    off = f"log-probabilities are {worst:.2g} nats off after a refused draft"
    return f"{off}; up to {tolerance:g} is rounding in {dtype}"


def _distances(plain: Decoded, drafted: Decoded) -> list[float]:
    """Return the distance of the distributions at each position after the first that has the same context."""
    found = []
    for place, (one, other) in enumerate(zip(plain.likeliest, drafted.likeliest, strict=False)):
        if place:
            found.append(_distance(one, other))
        if plain.tokens[place] != drafted.tokens[place]:
            break
    return found


def _distance(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    shared = one.keys() & other.keys()
    if 2 * len(shared) < len(one):
        return inf
    return median(abs(one[token] - other[token]) for token in shared)


def check_drafts(engine: Engine) -> None:
    """Refuse drafts, or their form, if they change the model's distributions by more than rounding.

    A few samples are decoded plainly, and again with drafts that are wrong on purpose. If the two differ, the
    engine decodes plainly from then on. It must be idle, and is idle afterwards.
    """
    if not engine.support.allows(Feature.DRAFTS) or engine.limits.max_model_len < _SHORTEST:
        return
    plain = _Run(engine, "plain").decode()
    for feature in (Feature.DRAFTS,) if engine.form is None else (Feature.DRAFTS, engine.form.feature):
        if reason := _difference(engine, plain, feature):
            _log.error("features_refused: %s: %s", feature.value, reason)
            engine.refuse(feature, reason)
            return


def _difference(engine: Engine, plain: Sequence[Decoded], feature: Feature) -> str:
    run = _Run(engine, feature.value, plain)
    try:
        drafted = run.decode()
    except Exception as error:  # vLLM's, or a kernel's.
        _log.exception("draft_check_failed")
        run.end()
        return f"a step with drafts failed: {type(error).__name__}: {error}"
    return disagreement(plain, drafted, engine.dtype)


class _Run:
    """Samples that are decoded together, with drafts if their plain responses are given."""

    def __init__(self, engine: Engine, name: str, plain: Sequence[Decoded] = ()) -> None:
        self._engine = engine
        self._vocab = engine.limits.vocab_size
        self._plain = plain
        self._form = engine.form if engine.form is not None and name == engine.form.feature else None
        count = min(_SAMPLES, engine.max_running)
        self._places = {f"draft-check-{name}-{place}": place for place in range(count)}
        self._found = [Decoded() for _ in range(count)]
        self._likeliest = min(_LIKELIEST, self._vocab)

    def decode(self) -> list[Decoded]:
        """Decode the samples, and return their responses."""
        engine, longest = self._engine, self._engine.limits.max_model_len
        count = min(_TOKENS, longest // 2)
        sampling = Sampling(max_tokens=count, ignore_eos=True, top_logprobs=self._likeliest)
        length = min(_PROMPT_TOKENS, longest - count)
        for sample_id, place in self._places.items():
            prompt = tuple((place * length + i) * _STRIDE % self._vocab for i in range(length))
            engine.add(EngineRequest(sample_id, prompt, (), sampling, place))
        while engine.has_work:
            if self._plain:
                self._put_drafts()
            for step in engine.step():
                self._record(step)
        engine.forget_kv()
        return self._found

    def end(self) -> None:
        """End the samples of a run that failed."""
        self._engine.abort(self._places)
        self._engine.forget_kv(preempt=True)

    def _put_drafts(self) -> None:
        drafts = dict[str, Sequence[int]]()
        for state in self._engine.decoding():
            place, here = self._places[state.sample_id], len(state.response)
            right = self._plain[place].tokens[here : here + _DRAFT_TOKENS]
            if min(state.room, len(right)) < _DRAFT_TOKENS:
                continue
            wrong = [(token + 1) % self._vocab for token in right]
            if self._form is not None:
                drafts[state.sample_id] = self._form.try_out(right, wrong)
            else:
                # In the first step all draft tokens are wrong.
                count = (place + here) % _DRAFT_TOKENS if here > 1 else 0
                drafts[state.sample_id] = [*right[:count], *wrong[count:]]
        self._engine.put_drafts(drafts)

    def _record(self, step: SampleStep) -> None:
        found, each = self._found[self._places[step.sample_id]], self._likeliest
        found.tokens.extend(step.token_ids)
        for i in range(0, len(step.top_token_ids), each):
            row = zip(step.top_token_ids[i : i + each], step.top_logprobs[i : i + each], strict=True)
            found.likeliest.append(dict(row))


# -- measurement of step times ----------------------------------------------------------------------------

# The first step of a shape may allocate memory or compile. The fastest of the others counts, because other load on
# the machine can only make a step slower.
_UNTIMED_STEPS, _STEPS = 1, 2
# A sweep with its prefill takes at most this multiple of the time given for measured steps; an instance waits for
# it.
_LONGEST = 4


@dataclass(slots=True)
class _Timer:
    """Clock, the seconds left to measure, and the time at which the sweep ends in any case."""

    clock: Callable[[], float]
    left: float
    until: float

    @property
    def over(self) -> bool:
        """True if no further shape may begin."""
        return self.left <= 0 or self.late

    @property
    def late(self) -> bool:
        """True if no further step may begin."""
        return self.clock() >= self.until


def measure_steps(
    engine: Engine, seconds: float = SWEEP_SECONDS, clock: Callable[[], float] = time.perf_counter
) -> list[MeasuredStep]:
    """Measure steps of an idle engine, as the prior of the step-time estimator; the most telling shapes come first.

    The steps verify random draft tokens: a step takes as long whether they are accepted or not, and because hardly
    any is accepted, contexts stay short.

    Args:
        engine: engine without samples; afterwards it has none, and no KV.
        seconds: time for the measured steps. Including prefill and everything else, the sweep takes at most four
            times as long plus one step.
        clock: clock in seconds.

    Raises:
        Exception: the engine failed; no sample of the sweep is left in it.
    """
    timer = _Timer(clock, seconds, clock() + _LONGEST * seconds)
    random, found = Random(0), list[MeasuredStep]()
    capacity = engine.kv_capacity
    most, longest = engine.row_capacity, engine.limits.max_model_len
    batches = swept_batches(engine.max_running, most, longest, engine.graph_sizes)
    for batch in batches:
        if batch.samples * 2 * batch.prompt <= capacity and not timer.over:
            found += _measure(engine, batch, timer, random)
    engine.forget_kv()
    return found


def _measure(engine: Engine, batch: SweptBatch, timer: _Timer, random: Random) -> list[MeasuredStep]:
    found = list[MeasuredStep]()
    names = [f"sweep-{batch.samples}-{batch.prompt}-{i}" for i in range(batch.samples)]
    try:
        _admit(engine, names, min(batch.prompt, engine.limits.max_model_len - 1), timer, random)
        for rows in batch.rows:
            taken = [_step(engine, rows, timer, random) for _ in range(_UNTIMED_STEPS + _STEPS)]
            full = [
                each for each in taken[_UNTIMED_STEPS:] if each is not None and each.samples == batch.samples
            ]
            if full:
                found.append(min(full, key=lambda each: each.seconds))
            if timer.over:
                break
    finally:
        engine.abort(names)
    while engine.has_work:
        # The worker learns only from a further step that the samples have ended.
        engine.step()
    return found


def _admit(engine: Engine, names: list[str], length: int, timer: _Timer, random: Random) -> None:
    """Start samples with random prompts of `length` tokens, and step until all decode, one ends, or time is up."""
    vocab = engine.limits.vocab_size
    for name in names:
        prompt = tuple(random.randrange(vocab) for _ in range(length))
        engine.add(EngineRequest(name, prompt, (), Sampling(ignore_eos=True), random.getrandbits(32)))
    while engine.has_work and len(engine.decoding()) < len(names) and not timer.late:
        if any(step.finish is not None for step in engine.step()):
            break


def _step(engine: Engine, rows: int, timer: _Timer, random: Random) -> MeasuredStep | None:
    """Run a step that verifies `rows` tokens; None if they do not fit, or if nothing decodes."""
    states, vocab = engine.decoding(), engine.limits.vocab_size
    if any(state.replayed for state in states):
        # Its tokens would be counted neither as samples nor as drafts.
        engine.step()
        states = engine.decoding()
    if not 0 < len(states) <= rows or timer.late:
        return None
    width, longer = divmod(rows - len(states), len(states))
    if min(state.room for state in states) < width + (longer > 0):
        return None
    drafts = {
        each.sample_id: [random.randrange(vocab) for _ in range(width + (i < longer))]
        for i, each in enumerate(states)
        if width or i < longer
    }
    engine.put_drafts(drafts)
    context = sum(len(state.prompt) + len(state.response) for state in states)
    began = timer.clock()
    engine.step()
    engine.settle()
    seconds = timer.clock() - began
    timer.left -= seconds
    return MeasuredStep(samples=len(states), rows=rows, context=context, seconds=max(seconds, 1e-9))
