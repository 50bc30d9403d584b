"""What an instance can still take of the samples that a plan gives it."""

from __future__ import annotations

from dataclasses import dataclass

from services.reallocator.price import By
from services.reallocator.records import Candidate, Move, Rules, Standing


@dataclass(slots=True)
class Space:
    """What an instance can still take."""

    instance_id: str
    samples: int
    room: int
    blocks: int
    taken: list[Move]

    @classmethod
    def of(cls, standing: Standing, rules: Rules) -> Space:
        """Of an instance; a share of its free blocks stays free."""
        blocks = int(standing.free_blocks * (1 - rules.spare_blocks))
        return cls(standing.instance_id, standing.samples, standing.room, blocks, [])

    def fits(self, candidate: Candidate) -> bool:
        """Whether there is a seat, and KV blocks."""
        # One block more: the sample goes on growing.
        return self.room > 0 and candidate.blocks + 1 <= self.blocks

    def take(self, candidate: Candidate) -> None:
        """Count one that goes there with its KV."""
        self.samples += 1
        self.room -= 1
        self.blocks -= candidate.blocks + 1
        self.taken.append(Move(candidate.key, By.KV, candidate.tokens))
