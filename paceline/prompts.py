"""Identity of prompts, and their order in an earlier epoch. Pure.

A prompt without a name is named by a hash of its tokens. The order of an earlier epoch forecasts the prompts that
come next.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline import types as t


def prompt_id_of(token_ids: Sequence[int]) -> str:
    """Return the id of a prompt: a hash of its tokens, the same in every epoch and run."""
    return hashlib.blake2b(np.asarray(token_ids, dtype="<i8").tobytes(), digest_size=16).hexdigest()


MOST_NEEDED = 64
"""Most forecasts that must come true in a row before one is given out."""
_MOST_RUNS = 64
"""Runs that are remembered; of more, those that asked last."""
_MOST_SLOTS = 1 << 10
"""Samples of a prompt in a step that are forecast."""


@dataclass(slots=True, eq=False)
class AskedStep:
    """Prompts of a step with their samples, in the order in which they first came. `number` counts the steps."""

    number: int
    step: int
    samples: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Prompt:
    """Prompt that is in `steps` of the remembered steps, of which number `last` is over and the latest."""

    token_ids: Sequence[int]
    sampling: t.SamplingParams
    last: int = -1
    steps: int = 0


class EpochOrder:
    """Order of the prompts of one run, and the forecast of the step after the present one.

    It holds at most `most_prompts` entries and `most_tokens` prompt tokens. An epoch that has more is forgotten
    before it begins anew, so that nothing of it is forecast.
    """

    def __init__(self, most_prompts: int, most_tokens: int) -> None:
        self.entries = 0
        """Prompts of the remembered steps; one counts in each step that asked for it."""
        self.tokens = 0
        self.missed = 0
        """Forecasts that were given out and did not come true."""
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
        """Difference between the numbers of the present and the previous step."""
        self._seed: int | None = None
        """Seed of the present step; None: it has several."""
        self._like: Counter[int] = Counter()
        """Prompts of the present step by the earlier step that asked for them last."""
        self._expected: AskedStep | None = None
        """Earlier step that the present one is expected to repeat."""
        self._found = 0
        """Prompts of it that have come."""
        self._on_time = True
        """False if a forecast was given out for another step than the one that came."""
        self._given: int | None = None
        """Step that was forecast in the present one."""
        self._answers_for = False
        """True if the present step was forecast, and that was given out."""
        self._in_a_row, self._needed = 0, 1
        self._told = -1
        """Highest step that somebody else announces."""

    def announced(self, step: int) -> None:
        """Note that the trainer announces this step itself: up to it nothing is forecast."""
        self._told = max(self._told, step)

    def ask(self, request: t.SampleRequest) -> t.BatchHint | None:
        """Note a sample that is asked for; return a hint of the next step, once a step, when it can be forecast.

        Samples with a prefix continue an earlier request, and greedy samples are an evaluation's: neither counts.
        """
        if len(request.prefix_token_ids) or request.sampling.temperature == 0:
            return None
        now = self._now
        if now is not None and request.step < now.step:
            if not self._over or request.step < self._over[-1].step:
                # The trainer has begun again.
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
            number, self._stride = before.number + 1, request.step - before.step
        now = self._now = AskedStep(number, request.step)
        self._seed = request.run_seed
        self._like.clear()
        self._found = 0
        self._answers_for, self._on_time = self._given is not None, self._given in (None, request.step)
        self._given = None
        return now

    def _end(self, now: AskedStep) -> None:
        """Judge the forecast of the step that is over, and make the forecast of the next step."""
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
        self._over.append(now)
        repeated = self._expected if is_true else self._likest()
        self._expected = None if repeated is None else self._after(repeated)

    def _is_true(self) -> bool:
        expected = self._expected
        return expected is not None and self._on_time and 2 * self._found >= len(expected.samples)

    def _likest(self) -> AskedStep | None:
        """Return the earlier step of which most prompts came in the present one, if that is half of them."""
        for number, count in self._like.most_common(1):
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
        """Enter a prompt that is new in the present step; return False if there is no room for it."""
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
                self._like[prompt.last] += 1
            self.tokens += own - len(prompt.token_ids)
            # The name may be the trainer's, and its tokens others than before.
            prompt.token_ids, prompt.sampling = tokens, request.sampling
        prompt.steps += 1
        now.samples[request.prompt_id] = request.slot + 1
        self.entries += 1
        while self._over and (self.entries > self._most_prompts or self.tokens > self._most_tokens):
            self._drop(self._over.popleft())
        if self.tokens > self._most_tokens:
            # The present step alone has more.
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
        wanted = self._given is None and self._seed is not None and coming > self._told
        if expected is None or not wanted or not self._is_true() or self._in_a_row + 1 < self._needed:
            return None
        if self._numbered(expected.number) is None:
            # It was forgotten meanwhile.
            return None
        if expected.number + 1 == now.number:
            # Each step has the same prompts.
            following = expected
        else:
            found = self._after(expected)
            assert found is not None, "it is over, and younger than one that is remembered"
            # Prompts that have come already were in the next step then, and are in the present step now.
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
    """Orders of all runs, together within the bounds of one. The run that asked longest ago is forgotten first."""

    def __init__(self, most_prompts: int, most_tokens: int = 1 << 24) -> None:
        self.missed = 0
        """Forecasts that were given out and did not come true."""
        self._most_prompts = most_prompts
        self._most_tokens = most_tokens
        self._runs: OrderedDict[str, EpochOrder] = OrderedDict()
        self._entries = self._tokens = 0

    def ask(self, request: t.SampleRequest) -> t.BatchHint | None:
        """Note a sample that is asked for; return a hint of the next step of its run where that is forecast."""
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
        """Note that a trainer announces a step itself."""
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
