"""Replay buffer Q (ReSpec, Algorithm 1), and the samples held out of it. Pure.

A hash of its tokens decides whether a prompt is learned from or held out, so drafters are never evaluated on
a prompt that was trained on, in any run, epoch or process. Both sides are bounded in tokens and drop their oldest
samples: for Q this is back-pressure (samples arrive faster than they are learned from), and the held-out ones stay
recent.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from random import Random

from services.drafter.learning.data import TrainingSample

_HASH_RANGE = 1 << 64


class _SampleQueue(deque[TrainingSample]):
    """Samples, oldest first, of about at most `most` tokens. `tokens` counts prompts, too."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.tokens = 0
        self._most = most

    def push(self, sample: TrainingSample) -> None:
        """Add the latest sample."""
        self.append(sample)
        self.tokens += sample.length

    def trim(self) -> list[TrainingSample]:
        """Drop the oldest samples above the bound, but not the last one, and return them."""
        dropped = []
        while self.tokens > self._most and len(self) > 1:
            dropped.append(self.popleft())
            self.tokens -= dropped[-1].length
        return dropped

    def empty(self) -> list[TrainingSample]:
        """Remove all samples and return them."""
        samples = list(self)
        self.clear()
        self.tokens = 0
        return samples


class ReplayBuffer:
    """Q and the held-out samples.

    `forced` are hashes of prompts that are held out although the share does not include them; the state of the
    learner keeps them for the next process.
    """

    def __init__(
        self, most_tokens: int, held_out_tokens: int, share: float, forced: Iterable[int] = ()
    ) -> None:
        """Start empty, with bounds in tokens; `share` of the prompts, in (0, 1), is held out."""
        self.forced = set(forced)
        self._share = share
        self._queue = _SampleQueue(most_tokens)
        self._held_out = _SampleQueue(held_out_tokens)

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def tokens(self) -> int:
        """Number of tokens in Q, prompts included."""
        return self._queue.tokens

    @property
    def held_out(self) -> Sequence[TrainingSample]:
        """Held-out samples, oldest first."""
        return self._held_out

    def add(self, sample: TrainingSample) -> tuple[list[TrainingSample], list[TrainingSample]]:
        """Add a sample and return the ones dropped for it: of Q, and of the held-out ones."""
        self._push(sample)
        return self._queue.trim(), self._held_out.trim()

    def draw(
        self, interval: int, most_tokens: int, seed: int
    ) -> tuple[list[TrainingSample], list[TrainingSample]]:
        """Empty Q and choose 1/`interval` of it at random, at least one sample, the same for the same seed.

        Of the chosen ones the latest are kept, at most `most_tokens` tokens or one sample. Returns those that an
        update learns from and those that it passes over, oldest first.
        """
        self._ensure_held_out()
        queue = self._queue.empty()
        count = -(-len(queue) // interval)
        places = sorted(Random(seed).sample(range(len(queue)), count))
        chosen: list[TrainingSample] = []
        tokens = 0
        for place in reversed(places):
            tokens += queue[place].length
            if chosen and tokens > most_tokens:
                break
            chosen.append(queue[place])
        kept = {id(each) for each in chosen}
        return chosen[::-1], [each for each in queue if id(each) not in kept]

    def _push(self, sample: TrainingSample) -> None:
        digest = prompt_hash(sample.prompt)
        is_held_out = digest in self.forced or digest < self._share * _HASH_RANGE
        (self._held_out if is_held_out else self._queue).push(sample)

    def _ensure_held_out(self) -> None:
        """Hold out one prompt if the hash holds out none, as it may when there are few."""
        if self._held_out or not self._queue:
            return
        digests = {prompt_hash(each.prompt) for each in self._queue}
        if len(digests) < 2:
            return
        self.forced.add(min(digests))
        for sample in self._queue.empty():
            self._push(sample)


def prompt_hash(prompt: Sequence[int]) -> int:
    """Return a uniform 64-bit hash of the tokens of a prompt."""
    digest = hashlib.blake2b(array("I", prompt).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
