"""Predicts how long a response will be, from the finished responses of the same prompt.

Pure: no clock, no I/O. Predictions only order the queue and balance load; a wrong one costs time, never
correctness.
"""

from bisect import insort
from collections import OrderedDict, deque
from dataclasses import dataclass, field

# Tokens assumed when nothing at all is known of a run.
UNKNOWN_LENGTH = 512.0
# Responses remembered per prompt: several epochs of a usual group, little memory.
WINDOW = 32
# Stragglers decide when a step ends, so a prompt counts as long as its long responses are.
QUANTILE = 0.8


@dataclass(slots=True)
class _History:
    """The last lengths of one prompt, in order of arrival and in order of size."""

    recent: deque[int] = field(default_factory=deque)
    ordered: list[int] = field(default_factory=list)

    def add(self, length: int) -> None:
        if len(self.recent) == WINDOW:
            self.ordered.remove(self.recent.popleft())
        self.recent.append(length)
        insort(self.ordered, length)

    def quantile(self) -> float:
        return float(self.ordered[min(int(QUANTILE * len(self.ordered)), len(self.ordered) - 1)])


@dataclass(slots=True)
class _Mean:
    count: int = 0
    total: float = 0.0


class LengthPredictor:
    """Response lengths in tokens by run and prompt; forgets the prompts not seen for longest.

    `max_prompts` bounds the memory: one history is at most 32 integers.
    """

    def __init__(self, max_prompts: int = 100_000) -> None:
        self._max_prompts = max_prompts
        self._histories: OrderedDict[tuple[str, str], _History] = OrderedDict()
        self._runs: dict[str, _Mean] = {}

    def observe(self, run_id: str, prompt_id: str, length: int) -> None:
        """Takes in the length of a response that ended by itself or at its limit (not a cancelled one)."""
        key = (run_id, prompt_id)
        self._histories.setdefault(key, _History()).add(length)
        self._histories.move_to_end(key)
        if len(self._histories) > self._max_prompts:
            self._histories.popitem(last=False)
        mean = self._runs.setdefault(run_id, _Mean())
        mean.count += 1
        mean.total += length

    def predict(self, run_id: str, prompt_id: str, expected: int = 0, limit: int | None = None) -> float:
        """Tokens of the next response: the prompt's own high quantile, else what the trainer expects
        (`expected`, 0 for unknown), else the run's mean; never above `limit`, never below 1."""
        predicted = self._guess(run_id, prompt_id, expected)
        return max(1.0, predicted if limit is None else min(predicted, float(limit)))

    def _guess(self, run_id: str, prompt_id: str, expected: int) -> float:
        history = self._histories.get((run_id, prompt_id))
        if history is not None:
            return history.quantile()
        if expected > 0:
            return float(expected)
        mean = self._runs.get(run_id)
        return mean.total / mean.count if mean else UNKNOWN_LENGTH
