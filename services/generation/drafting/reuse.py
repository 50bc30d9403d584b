"""Which tokens of their cached rollouts LENIENT samples verify next.

A sample follows its cached rollout until the first token that is not taken over. It verifies a chunk of the
rollout a step, whatever the drafters say and whether there are any: each step is one forward pass over the chunk,
as a prefill is. How a rollout is cut into chunks changes no token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.generation.engine.types import SampleRequest, SampleState, SampleStep

# What results and metrics call the origin of these drafts.
SOURCE = "cached"


def guess_of(request: SampleRequest) -> tuple[tuple[int, ...], str]:
    """A guess of the whole response, for drafters, and its source.

    Where nothing was given it is the cached rollout: a sample that has left it may come back to it.
    """
    if request.given or not request.cached:
        return request.given, "given"
    return request.cached, SOURCE


@dataclass(frozen=True, slots=True)
class Reused:
    """What a step did for a sample that was following its rollout: tokens taken over, rows that it took."""

    tokens: int
    rows: int


@dataclass(slots=True)
class Reuse:
    """The samples that follow a cached rollout. Used by the engine thread only.

    At most `chunk` draft tokens a sample and step.
    """

    chunk: int = 128
    # The tokens of its rollout that a sample has not come to; at least one.
    _ahead: dict[str, Sequence[int]] = field(init=False, default_factory=dict)

    def __len__(self) -> int:
        return len(self._ahead)

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._ahead

    def begin(self, request: SampleRequest) -> None:
        """A sample enters the engine."""
        if request.follows:
            self._ahead[request.sample_id] = request.cached

    def end(self, sample_id: str) -> None:
        """A sample left the engine."""
        self._ahead.pop(sample_id, None)

    def drafts(self, samples: Sequence[SampleState], room: int) -> dict[str, list[int]]:
        """The tokens to verify in the coming step, by sample id.

        Args:
            samples: the samples that can verify a draft; those that follow no rollout are passed over.
            room: for draft tokens, of all samples together.
        """
        wanted = {sample.sample_id: self._wanted(sample) for sample in samples if sample.sample_id in self}
        given = share(wanted, max(room, 0))
        return {
            sample_id: list(self._ahead[sample_id][:count]) for sample_id, count in given.items() if count
        }

    def learn(self, step: SampleStep) -> Reused | None:
        """What a step did for a sample, which may follow no more from now on; None if it did not follow before."""
        ahead = self._ahead.get(step.sample_id)
        if ahead is None:
            return None
        if step.reused == len(step.token_ids) and step.reused < len(ahead):
            self._ahead[step.sample_id] = ahead[step.reused :]
        else:
            del self._ahead[step.sample_id]
        return Reused(step.reused, step.drafted + 1)

    def _wanted(self, sample: SampleState) -> int:
        # The last token needs no draft: the row before it decides on it, and if it ends the sample, a row behind
        # it would be for nothing.
        return max(min(self.chunk, len(self._ahead[sample.sample_id]) - 1, sample.room), 0)


def share(wanted: Mapping[str, int], budget: int) -> dict[str, int]:
    """Spread a budget evenly; nobody gets more than is wanted. All of it is given out, or all that is wanted."""
    given: dict[str, int] = {}
    waiting = len(wanted)
    for name, count in sorted(wanted.items(), key=lambda item: item[1]):
        given[name] = min(count, budget // waiting)
        budget -= given[name]
        waiting -= 1
    return given
