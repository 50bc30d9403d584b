"""Verify cached rollouts chunk by chunk for samples of the level LENIENT (SPEC-RL).

A sample follows its cached rollout until the first token that is rejected. In each step it verifies a chunk of the
rollout in one forward pass, like a prefill, whatever the drafters propose. The size of chunks changes no token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.generation.engine.types import EngineRequest, EngineSampleState, SampleStep

CACHED_SOURCE = "cached"
"""Origin of these drafts in results and metrics."""


def guess_of(request: EngineRequest) -> tuple[tuple[int, ...], str]:
    """Return a guess of the whole response, for drafters, and its source.

    If the caller sent none, it is the cached rollout: a sample that has left it may come back to it.
    """
    if request.given or not request.cached:
        return request.given, "reference"
    return request.cached, CACHED_SOURCE


@dataclass(slots=True)
class Reuse:
    """Samples that follow a cached rollout, with at most `chunk` draft tokens per step; engine thread only."""

    chunk: int = 128
    # For each sample, the tokens of its rollout that are not verified yet, at least one.
    _ahead: dict[str, Sequence[int]] = field(init=False, default_factory=dict)

    def __len__(self) -> int:
        return len(self._ahead)

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._ahead

    def begin(self, request: EngineRequest) -> None:
        """Register a sample that enters the engine."""
        if request.follows:
            self._ahead[request.sample_id] = request.cached

    def end(self, sample_id: str) -> None:
        """Release a sample that left the engine."""
        self._ahead.pop(sample_id, None)

    def drafts(self, samples: Sequence[EngineSampleState], room: int) -> dict[str, Sequence[int]]:
        """Return the tokens to verify in the next step, by sample id.

        Args:
            samples: the samples that can verify a draft; those that follow no rollout are ignored.
            room: most draft tokens of all samples together.
        """
        wanted = {sample.sample_id: self._wanted(sample) for sample in samples if sample.sample_id in self}
        shares = fair_shares(wanted, max(room, 0))
        return {
            sample_id: list(self._ahead[sample_id][:count]) for sample_id, count in shares.items() if count
        }

    def learn(self, step: SampleStep) -> tuple[int, int] | None:
        """Learn the verification of a sample's chunk; a rejection ends following.

        Returns:
            The tokens kept, and the verified tokens (rows) that it took; None for a sample that follows no rollout.
        """
        ahead = self._ahead.get(step.sample_id)
        if ahead is None:
            return None
        if step.reused == len(step.token_ids) and step.reused < len(ahead):
            self._ahead[step.sample_id] = ahead[step.reused :]
        else:
            del self._ahead[step.sample_id]
        return step.reused, step.drafted + 1

    def _wanted(self, sample: EngineSampleState) -> int:
        # The last token is not drafted: the row before it decides on it, and if it ends the sample, a row
        # behind it would be wasted.
        return max(min(self.chunk, len(self._ahead[sample.sample_id]) - 1, sample.room), 0)


def fair_shares(wanted: Mapping[str, int], budget: int) -> dict[str, int]:
    """Return the budget in even shares, none above what is wanted; what one does not want goes to the others."""
    shares: dict[str, int] = {}
    waiting = len(wanted)
    for name, count in sorted(wanted.items(), key=lambda item: item[1]):
        shares[name] = min(count, budget // waiting)
        budget -= shares[name]
        waiting -= 1
    return shares
