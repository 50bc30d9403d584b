"""Ids of prompts without a name, and forecasts of the next step from the order of an earlier epoch. Pure."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline import types as t

MOST_NEEDED = 64
"""Upper limit of the consecutive correct forecasts that are required before one is returned."""
_MOST_RUNS = 64
"""Runs that are remembered; the one without requests for longest is forgotten first."""
_MOST_SLOTS = 1 << 10
"""Most samples of a prompt in a step that are forecast."""


def prompt_id_of(token_ids: Sequence[int]) -> str:
    """Return the id of a prompt: a hash of its tokens, the same in every epoch and run."""
    return hashlib.blake2b(np.asarray(token_ids, dtype="<i8").tobytes(), digest_size=16).hexdigest()


@dataclass(slots=True, eq=False)
class AskedStep:
    """Prompts requested in a step with their samples, in the order of their first requests."""

    number: int
    """Number of the step among the requested ones."""
    step: int
    samples: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Prompt:
    """Prompt of remembered steps."""

    token_ids: Sequence[int]
    sampling: t.SamplingParams
    last: int = -1
    """Number of the last completed step that requested it."""
    steps: int = 0
    """Remembered steps that requested it."""


class EpochOrder:
    """Order of the prompts of one run, and the forecast of its next step.

    It holds at most `most_prompts` entries and `most_tokens` prompt tokens. A larger epoch is forgotten before it
    is repeated, so nothing of it is forecast.
    """

    def __init__(self, most_prompts: int, most_tokens: int) -> None:
        self.entries = 0
        """Prompts of the remembered steps; a prompt counts in each step that requested it."""
        self.tokens = 0
        self.missed = 0
        """Forecasts that were returned and turned out wrong."""
        self._most_prompts = most_prompts
        self._most_tokens = most_tokens
        self._forget()

    def _forget(self) -> None:
        self.entries = self.tokens = 0
        self._prompts: dict[str, _Prompt] = {}
        self._over: deque[AskedStep] = deque()
        """Steps that are over; their numbers are consecutive."""
        self._now: AskedStep | None = None
        self._stride = 1
        """Difference between the current and the previous step."""
        self._seed: int | None = None
        """Seed of the current step; None: the step has several."""
        self._shared: Counter[int] = Counter()
        """Number of prompts of the current step by the earlier step that requested them last."""
        self._expected: AskedStep | None = None
        """Earlier step that the current one is expected to repeat."""
        self._found = 0
        """Prompts of the expected step that were requested in the current one."""
        self._on_time = True
        """False if a forecast was returned for a step other than the current one."""
        self._given: int | None = None
        """Step whose forecast was returned in the current one."""
        self._answers_for = False
        """True if a forecast of the current step was returned."""
        self._in_a_row, self._needed = 0, 1
        self._announced = -1
        """Highest step that the trainer announces itself."""

    def announced(self, step: int) -> None:
        """Note that the trainer announces this step itself: no step up to it is forecast."""
        self._announced = max(self._announced, step)

    def ask(self, request: t.SampleRequest) -> t.BatchHint | None:
        """Note a request for a sample; return a hint of the next step, once a step, if it can be forecast.

        Requests with a prefix, which continue earlier ones, and greedy requests, which are evaluations, do not
        count.
        """
        if len(request.prefix_token_ids) or request.sampling.temperature == 0:
            return None
        now = self._now
        if now is not None and request.step < now.step:
            if not self._over or request.step < self._over[-1].step:
                # The trainer has started over.
                self._forget()
                now = None
            else:
                return None
        if now is None or request.step > now.step:
            now = self._begin(request)
        if request.run_seed != self._seed:
            self._seed = None
        if request.slot >= _MOST_SLOTS:
            return None
        known = now.samples.get(request.prompt_id)
        if known is not None:
            now.samples[request.prompt_id] = max(known, request.slot + 1)
            return None
        if not self._note(now, request):
            return None
        if self._expected is not None and request.prompt_id in self._expected.samples:
            self._found += 1
        return self._forecast(now, request)

    def _begin(self, request: t.SampleRequest) -> AskedStep:
        before, number = self._now, 0
        if before is not None:
            self._end(before)
            number, self._stride = before.number + bool(before.samples), request.step - before.step
        now = self._now = AskedStep(number, request.step)
        self._seed = request.run_seed
        self._shared.clear()
        self._found = 0
        self._answers_for, self._on_time = self._given is not None, self._given in (None, request.step)
        self._given = None
        return now

    def _end(self, now: AskedStep) -> None:
        """Compare the step that has ended with its forecast, and forecast the next step."""
        is_true = self._is_true()
        if is_true:
            self._in_a_row += 1
            if self._answers_for:
                self._needed = max(1, self._needed // 2)
        else:
            self._in_a_row = 0
            if self._answers_for:
                self.missed += 1
                self._needed = min(2 * self._needed, MOST_NEEDED)
        for prompt_id in now.samples:
            self._prompts[prompt_id].last = now.number
        if now.samples:
            self._over.append(now)
        repeated = self._expected if is_true else self._most_similar()
        self._expected = None if repeated is None else self._after(repeated)

    def _is_true(self) -> bool:
        expected = self._expected
        return expected is not None and self._on_time and 2 * self._found >= len(expected.samples)

    def _most_similar(self) -> AskedStep | None:
        """Return the earlier step that shares most prompts with the current one, if it shares at least half."""
        for number, count in self._shared.most_common(1):
            earlier = self._numbered(number)
            if earlier is not None and 2 * count >= len(earlier.samples):
                return earlier
        return None

    def _numbered(self, number: int) -> AskedStep | None:
        place = number - self._over[0].number if self._over else -1
        return self._over[place] if 0 <= place < len(self._over) else None

    def _after(self, earlier: AskedStep) -> AskedStep | None:
        return self._numbered(earlier.number + 1)

    def _note(self, now: AskedStep, request: t.SampleRequest) -> bool:
        """Add a prompt that is new in the current step; return False if there is no room for it."""
        own = len(request.prompt_token_ids)
        if len(now.samples) >= self._most_prompts or own > self._most_tokens:
            return False
        prompt = self._prompts.get(request.prompt_id)
        tokens = array("I", np.asarray(request.prompt_token_ids, np.uint32).tobytes())
        if prompt is None:
            prompt = self._prompts[request.prompt_id] = _Prompt(tokens, request.sampling)
            self.tokens += own
        else:
            if prompt.last >= 0:
                self._shared[prompt.last] += 1
            self.tokens += own - len(prompt.token_ids)
            # A trainer may reuse a name for other tokens.
            prompt.token_ids, prompt.sampling = tokens, request.sampling
        prompt.steps += 1
        now.samples[request.prompt_id] = request.slot + 1
        self.entries += 1
        while self._over and (self.entries > self._most_prompts or self.tokens > self._most_tokens):
            self._drop(self._over.popleft())
        if self.tokens > self._most_tokens:
            # The current step alone exceeds the limit.
            self._forget()
            return False
        return True

    def _drop(self, step: AskedStep) -> None:
        self.entries -= len(step.samples)
        for prompt_id in step.samples:
            prompt = self._prompts[prompt_id]
            prompt.steps -= 1
            if not prompt.steps:
                self.tokens -= len(prompt.token_ids)
                del self._prompts[prompt_id]

    def _forecast(self, now: AskedStep, request: t.SampleRequest) -> t.BatchHint | None:
        coming, expected = now.step + self._stride, self._expected
        wanted = self._given is None and self._seed is not None and coming > self._announced
        if expected is None or not wanted or not self._is_true() or self._in_a_row + 1 < self._needed:
            return None
        if self._numbered(expected.number) is None:
            # The step was forgotten meanwhile.
            return None
        if expected.number + 1 == now.number:
            # Every step has the same prompts.
            following = expected
        else:
            found = self._after(expected)
            assert found is not None, "it is over, and younger than one that is remembered"
            # Prompts that were requested already belong to the current step now.
            following = AskedStep(0, 0, {p: n for p, n in found.samples.items() if p not in now.samples})
        groups = [self._group(each, samples, request) for each, samples in following.samples.items()]
        if not groups:
            return None
        self._given = coming
        version = coming if request.policy_version is None else request.policy_version + 1
        return t.BatchHint(
            request.run_id, coming, version, groups, request.sampling, request.exactness, request.run_seed
        )

    def _group(self, prompt_id: str, samples: int, request: t.SampleRequest) -> t.Group:
        prompt = self._prompts[prompt_id]
        own = None if prompt.sampling == request.sampling else prompt.sampling
        return t.Group(prompt_id, prompt.token_ids, samples, own)


class EpochOrders:
    """Orders of all runs, together within the limits of one. The least recently active run is dropped first."""

    def __init__(self, most_prompts: int, most_tokens: int = 1 << 24) -> None:
        self.missed = 0
        """Forecasts that were returned and turned out wrong."""
        self._most_prompts = most_prompts
        self._most_tokens = most_tokens
        self._runs: OrderedDict[str, EpochOrder] = OrderedDict()
        self._entries = self._tokens = 0

    def ask(self, request: t.SampleRequest) -> t.BatchHint | None:
        """Note a request for a sample; return a hint of the next step of its run if it can be forecast."""
        order = self._order(request.run_id)
        entries, tokens, missed = order.entries, order.tokens, order.missed
        hint = order.ask(request)
        self._entries += order.entries - entries
        self._tokens += order.tokens - tokens
        self.missed += order.missed - missed
        while self._entries > self._most_prompts or self._tokens > self._most_tokens:
            self._drop_oldest()
        return hint

    def announced(self, run_id: str, step: int) -> None:
        """Note that the trainer of a run announces a step itself."""
        self._order(run_id).announced(step)

    def _order(self, run_id: str) -> EpochOrder:
        order = self._runs.get(run_id)
        if order is None:
            order = self._runs[run_id] = EpochOrder(self._most_prompts, self._most_tokens)
            if len(self._runs) > _MOST_RUNS:
                self._drop_oldest()
        self._runs.move_to_end(run_id)
        return order

    def _drop_oldest(self) -> None:
        _, oldest = self._runs.popitem(last=False)
        self._entries -= oldest.entries
        self._tokens -= oldest.tokens
