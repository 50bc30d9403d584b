"""Estimate the tokens that samples still need, from lengths of earlier responses and existing drafts.

Pure: no clock, no I/O. Predictions only order the queue and balance load; a wrong one costs time, never
correctness.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.contracts.gateway_keys import BatchKey
from services.gateway.state.rollout_batch import RolloutBatch

# Tokens assumed when nothing at all is known of a run.
UNKNOWN_LENGTH = 512.0
# Responses remembered per prompt: enough for several epochs of a usual group, in little memory.
WINDOW = 32
# Stragglers determine when a step ends, so the prediction for a prompt is the length of its long responses.
QUANTILE = 0.8


@dataclass(slots=True)
class _History:
    """Last lengths of one prompt, oldest first, and their quantile.

    An array takes 4 bytes a length, where a deque and its integers take 36.
    """

    recent: array[int] = field(default_factory=lambda: array("I"))
    quantile: float = 0.0

    def add(self, length: int) -> None:
        if len(self.recent) == WINDOW:
            self.recent.pop(0)
        self.recent.append(length)
        ordered = sorted(self.recent)
        self.quantile = float(ordered[min(int(QUANTILE * len(ordered)), len(ordered) - 1)])


class LengthPredictor:
    """Predictor of response lengths in tokens, by run and prompt.

    `max_prompts` and `max_runs` bound the memory, about 0.5 KiB a prompt: the least recently seen are forgotten.
    """

    def __init__(self, max_prompts: int = 100_000, max_runs: int = 10_000) -> None:
        self._max_prompts, self._max_runs = max_prompts, max_runs
        self._histories: OrderedDict[tuple[str, str], _History] = OrderedDict()
        # Run id -> number of its responses, and their tokens.
        self._runs: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def observe(self, run_id: str, prompt_id: str, length: int) -> None:
        """Learn from a response that ended by itself or at its limit (not a cancelled one)."""
        key = (run_id, prompt_id)
        history = self._histories.get(key)
        if history is None:
            history = self._histories[key] = _History()
        history.add(length)
        self._histories.move_to_end(key)
        if len(self._histories) > self._max_prompts:
            self._histories.popitem(last=False)
        count, total = self._runs.pop(run_id, (0, 0))
        self._runs[run_id] = count + 1, total + length
        if len(self._runs) > self._max_runs:
            self._runs.popitem(last=False)

    def predict(self, run_id: str, prompt_id: str, expected: int = 0, limit: int | None = None) -> float:
        """Return the expected tokens of the next response, between 1 and `limit`.

        This is the prompt's own high quantile, else what the trainer expects (`expected`, 0 for unknown),
        else the run's mean.
        """
        if (history := self._histories.get((run_id, prompt_id))) is not None:
            predicted = history.quantile
        elif expected > 0:
            predicted = float(expected)
        else:
            count, total = self._runs.get(run_id, (0, 0))
            predicted = total / count if count else UNKNOWN_LENGTH
        return max(1.0, predicted if limit is None else min(predicted, float(limit)))


@dataclass(frozen=True, slots=True)
class DraftCoverage:
    """Draft of a sample that exists before the sample starts. A `finished` one ended by itself."""

    tokens: int
    finished: bool = False


# Prompt id and slot -> the draft of the sample.
Coverage = Mapping[tuple[str, int], DraftCoverage]


def remaining_work(predicted: float, have: int, covered: DraftCoverage | None, draft_cost: float) -> float:
    """Return the remaining work of a sample, in tokens that are generated one by one; at least 1.

    `predicted` is its length without a draft, and `have` of its tokens exist. A finished draft gives the final
    length, an unfinished one a lower bound. A drafted token costs `draft_cost` of a generated one.
    """
    if covered is None:
        return max(1.0, predicted - have)
    length = float(covered.tokens) if covered.finished else max(predicted, float(covered.tokens))
    drafted = max(0, covered.tokens - have)
    generated = length - max(have, covered.tokens)
    return max(1.0, draft_cost * drafted + max(0.0, generated))


class WorkEstimator:
    """Remaining work of the samples in work, in tokens."""

    def __init__(self, draft_cost: float) -> None:
        self.lengths = LengthPredictor()
        self._draft_cost = draft_cost
        # Drafts of the samples of a batch when it began.
        self._coverage: dict[BatchKey, Coverage] = {}

    def cover(self, batch: RolloutBatch, coverage: Coverage) -> None:
        """Record the drafts of a batch."""
        self._coverage[batch.key] = coverage

    def knows(self, batch: RolloutBatch) -> bool:
        """Return True if drafts of a batch were recorded."""
        return batch.key in self._coverage

    def covered(self, batch: RolloutBatch, index: int) -> DraftCoverage | None:
        """Return the draft of a sample, if there is one."""
        coverage = self._coverage.get(batch.key)
        if not coverage:
            return None
        return coverage.get((batch.group_of(index).prompt_id, batch.samples[index].slot))

    def forget(self, batch: RolloutBatch) -> None:
        """Forget the drafts of a batch."""
        self._coverage.pop(batch.key, None)

    def observe(self, batch: RolloutBatch, index: int) -> bool:
        """Learn from the length of a completed or truncated sample; return True if that changes a prediction."""
        before = self._length(batch, index)
        length = len(batch.samples[index].tokens)
        self.lengths.observe(batch.key[0], batch.group_of(index).prompt_id, length)
        return self._length(batch, index) != before

    def remaining(self, batch: RolloutBatch, index: int) -> float:
        """Return the predicted remaining tokens of a sample, in which drafted tokens count for less."""
        have, covered = len(batch.samples[index].tokens), self.covered(batch, index)
        return remaining_work(self._length(batch, index), have, covered, self._draft_cost)

    def _length(self, batch: RolloutBatch, index: int) -> float:
        group = batch.group_of(index)
        limit = group.sampling.max_tokens if group.sampling.HasField("max_tokens") else None
        return self.lengths.predict(batch.key[0], group.prompt_id, group.expected_tokens, limit)
