"""The replay buffer Q (ReSpec, Algorithm 1), and the rollouts that are held out of it. Pure.

A prompt is either learned from or held out, by a hash of its tokens, so that nothing that is evaluated on was
ever trained on, whichever run, epoch or process it comes in. Both sides are bounded in tokens, the oldest give
way: in Q that is back-pressure (samples come faster than they are learned from), among the held-out ones it is
what keeps them recent.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from services.drafter.join import Joined

_HASH_RANGE = 1 << 64


@dataclass(frozen=True, slots=True)
class Draw:
    """What an update learns from, and what of Q it passes over: the rest of the 1/I, and what is above its
    bound."""

    chosen: tuple[Joined, ...]
    passed_over: tuple[Joined, ...]


class ReplayBuffer:
    """Q and the held-out rollouts. `forced` are hashes of prompts that are held out though their hash would not
    have it; they are to be kept for the next process."""

    def __init__(
        self, most_tokens: int, held_out_tokens: int, share: float, forced: Iterable[int] = ()
    ) -> None:
        """`share`: of the prompts that are held out, in (0, 1)."""
        self.forced = set(forced)
        self._most, self._most_held_out = most_tokens, held_out_tokens
        self._share = share
        self._queue: deque[Joined] = deque()
        self._held_out: deque[Joined] = deque()
        self._tokens = self._held_out_tokens = 0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def tokens(self) -> int:
        """In Q, prompts included."""
        return self._tokens

    @property
    def held_out(self) -> Sequence[Joined]:
        """The held-out rollouts, oldest first."""
        return self._held_out

    def add(self, joined: Joined) -> tuple[list[Joined], list[Joined]]:
        """Takes a rollout in. What had to go for it: of Q, and of the held-out ones."""
        if self._is_held_out(prompt_hash(joined.sample.prompt)):
            self._hold_out(joined)
        else:
            self._queue.append(joined)
            self._tokens += joined.sample.tokens
        return self._trim(), self._trim_held_out()

    def draw(self, interval: int, most_tokens: int, seed: int) -> Draw:
        """Empties Q: a share 1/`interval` of it, at least one rollout, at random but the same for the same
        seed, and of these at most so many tokens, the latest first."""
        self._ensure_held_out()
        queue = list(self._queue)
        self._queue.clear()
        self._tokens = 0
        count = -(-len(queue) // interval)
        places = sorted(Random(seed).sample(range(len(queue)), count))
        chosen: list[Joined] = []
        tokens = 0
        for place in reversed(places):
            tokens += queue[place].sample.tokens
            if chosen and tokens > most_tokens:
                break
            chosen.append(queue[place])
        kept = {id(each) for each in chosen}
        rest = tuple(each for each in queue if id(each) not in kept)
        return Draw(tuple(reversed(chosen)), rest)

    def _is_held_out(self, digest: int) -> bool:
        return digest in self.forced or digest < self._share * _HASH_RANGE

    def _hold_out(self, joined: Joined) -> None:
        self._held_out.append(joined)
        self._held_out_tokens += joined.sample.tokens

    def _ensure_held_out(self) -> None:
        """Few prompts may all fall on one side. Before any is learned from, one is taken to the other."""
        if self._held_out or not self._queue:
            return
        digests = {prompt_hash(each.sample.prompt) for each in self._queue}
        if len(digests) < 2:
            return
        chosen = min(digests)
        self.forced.add(chosen)
        queue, self._queue = self._queue, deque()
        self._tokens = 0
        for joined in queue:
            if prompt_hash(joined.sample.prompt) == chosen:
                self._hold_out(joined)
            else:
                self._queue.append(joined)
                self._tokens += joined.sample.tokens

    def _trim(self) -> list[Joined]:
        dropped = []
        while self._tokens > self._most and len(self._queue) > 1:
            dropped.append(self._queue.popleft())
            self._tokens -= dropped[-1].sample.tokens
        return dropped

    def _trim_held_out(self) -> list[Joined]:
        retired = []
        while self._held_out_tokens > self._most_held_out and len(self._held_out) > 1:
            retired.append(self._held_out.popleft())
            self._held_out_tokens -= retired[-1].sample.tokens
        return retired


def prompt_hash(prompt: Sequence[int]) -> int:
    """64 bits of the tokens of a prompt, uniform."""
    digest = hashlib.blake2b(array("I", prompt).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
