"""Suffix index: predicts continuations from all known rollouts of a prompt, running ones included.

    index = SuffixIndex(max_tokens=1_000_000)
    index.put_prompt("p", prompt_tokens)
    index.insert("p", ("r", 3), version=7, tokens=rollout)
    handle = index.open("p", "running", version=8)
    found = index.step(np.array([handle]), new_tokens, np.array([0, len(new_tokens)]), window=8)

Importing this module does not import numba; constructing a SuffixIndex, or warm_up, does. One thread at a time may
be inside an index; the compiled parts release the GIL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kernels.suffix_index import records
from kernels.suffix_index.records import (
    TEXT_COST,
    Continuations,
    IndexedRollout,
    Name,
    check_name,
    check_version,
    token_array,
)

if TYPE_CHECKING:
    from kernels.suffix_index.arena import Arena
    from kernels.suffix_index.prompts import Prompts

MOST_TOKENS = 1 << 26
"""Largest max_tokens, some 6 GB."""


def warm_up(branches: int = 0) -> None:
    """Compile the kernels or load them from the cache, so that the first step does not pay for it."""
    index = SuffixIndex(max_tokens=10_000)
    index.put_prompt("", [1, 2, 3])
    index.insert("", 0, 0, np.random.default_rng(0).integers(0, 1000, 2000))
    handle = index.open("", 1, 0)
    index.step(np.array([handle]), np.array([1, 2], np.int32), np.array([0, 2]), 1, branches)
    index.close(handle, keep=False)
    index.drop("")


class SuffixIndex:
    """Index over the texts of all known rollouts by prompt, running ones included.

    The longest suffix of a growing rollout that occurs elsewhere in the texts of its prompt decides its
    continuation: the most frequent one there, with occurrences of newer policy versions weighing more. If a
    table shared by all prompts, with one continuation for each short context, knows a longer context, that one
    decides.

    max_tokens: bound of all texts together, prompts included; each text counts 16 tokens more than it has. Above
    the bound, additions evict the least recently used prompts without a growing rollout, then the finished rollouts
    of the oldest versions. Memory is at most about 200 bytes a token, and usually 100. decay: weight of a rollout
    relative to one of the next policy version, in (0, 1]. reach: most contexts in which one occurrence is counted,
    the longest first; bounds the work for repetitive texts. min_match: shortest context from the prompt's texts on
    which a prediction may be based. floor: a continuation ends where the product of its probabilities falls below
    this.

    Names are strings, integers or flat tuples of these; token ids are integers in [0, 2**31). TypeError and
    ValueError for others.
    """

    def __init__(
        self, *, max_tokens: int, decay: float = 0.5, reach: int = 64, min_match: int = 2, floor: float = 0.0
    ) -> None:
        if not 1 <= max_tokens <= MOST_TOKENS:
            raise ValueError(f"max_tokens must be in [1, {MOST_TOKENS}], got {max_tokens}")
        if not 0.0 < decay <= 1.0:
            raise ValueError(f"decay must be in (0, 1], got {decay}")
        if reach < 1 or min_match < 1:
            raise ValueError(f"reach and min_match must be positive, got {reach} and {min_match}")
        if not 0.0 <= floor <= 1.0:
            raise ValueError(f"floor must be in [0, 1], got {floor}")
        from kernels.suffix_index.arena import Arena
        from kernels.suffix_index.prompts import Prompts, Stepper

        self._settings = records.IndexSettings(max_tokens, decay, reach, min_match, floor)
        self._arena: Arena = Arena(max_tokens)
        self._prompts: Prompts = Prompts(self._arena, max_tokens, decay, reach)
        self._stepper = Stepper(self._arena, self._prompts, self._settings)

    @property
    def tokens(self) -> int:
        """Tokens held, of prompts, rollouts and growing rollouts."""
        texts = sum(1 + len(entry.rollouts) + len(entry.growing) for _, entry in self._prompts)
        return self._prompts.used - TEXT_COST * texts

    @property
    def nbytes(self) -> int:
        """Bytes allocated for the automata, the shared table and the texts."""
        texts = sum(
            entry.tokens.nbytes + sum(rollout.tokens.nbytes for rollout in entry.rollouts.values())
            for _, entry in self._prompts
        )
        return self._arena.nbytes + texts

    def has(self, prompt: Name, rollout: Name) -> bool:
        """Return True if the prompt has a rollout of this name, finished or growing."""
        entry = self._prompts.get(prompt)
        return entry is not None and (rollout in entry.rollouts or rollout in entry.growing)

    def put_prompt(self, prompt: Name, tokens: npt.ArrayLike) -> None:
        """Set the prompt's own tokens, the context that every rollout of it starts from. Idempotent.

        ValueError if they cannot fit; nothing is changed then.
        """
        check_name(prompt)
        array = token_array(tokens)
        known = self._prompts.get(prompt)
        if known is not None and np.array_equal(known.tokens, array):
            self._prompts.use(prompt)
            return
        needed = len(array) - len(known.tokens) if known else len(array) + TEXT_COST
        if not self._prompts.make_room(needed, prompt):
            raise ValueError(f"no room for prompt {prompt!r}, {len(array)} tokens: {self._bound}")
        self._prompts.set_tokens(prompt, array)

    def insert(self, prompt: Name, rollout: Name, version: int, tokens: npt.ArrayLike) -> None:
        """Add a whole rollout; it replaces one of the same name, and an equal one is left alone.

        ValueError if it cannot fit (nothing is changed then) or names a growing rollout.
        """
        added = IndexedRollout(version, token_array(tokens))
        old = self._finished(prompt, rollout, version)
        if old is not None and old.version == version and np.array_equal(old.tokens, added.tokens):
            self._prompts.use(prompt)
            return
        what = f"rollout {rollout!r} of prompt {prompt!r}"
        self._admit(prompt, rollout, added.cost, what)
        if not self._prompts.add(prompt, rollout, added):
            raise ValueError(f"no room for {what}, {len(added.tokens)} tokens: {self._bound}")

    def open(self, prompt: Name, rollout: Name, version: int) -> int:
        """Begin the growing rollout of a running sample; return its handle for step and close.

        ValueError if a growing rollout has this name or it cannot fit; a finished one of this name is replaced.
        """
        self._finished(prompt, rollout, version)
        self._admit(prompt, rollout, TEXT_COST, f"rollout {rollout!r} of prompt {prompt!r}")
        return self._prompts.open(prompt, rollout, version)

    def close(self, handle: int, *, keep: bool = True) -> None:
        """End the growth of a rollout, and keep it like others or remove it. KeyError: no such handle."""
        self._prompts.close(int(handle), keep)

    def remove(self, prompt: Name, rollout: Name) -> bool:
        """Remove a finished rollout; False when there is none of that name. ValueError for a growing one."""
        entry = self._prompts.get(prompt)
        if entry is None or rollout not in entry.rollouts:
            if entry is not None and rollout in entry.growing:
                raise ValueError(f"rollout {rollout!r} of prompt {prompt!r} is growing: close it")
            return False
        self._prompts.forget(prompt, [rollout])
        return True

    def drop(self, prompt: Name) -> bool:
        """Forget a prompt and all its rollouts; handles of its growing ones are invalid then. False if unknown.

        The shared table keeps what it learned from them until other texts overwrite it.
        """
        if self._prompts.get(prompt) is None:
            return False
        self._prompts.drop(prompt)
        return True

    def step(
        self,
        handles: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int32],
        cu: npt.NDArray[np.int64],
        window: int,
        branches: int = 0,
        asked: npt.NDArray[np.bool_] | None = None,
    ) -> Continuations:
        """Append tokens[cu[i] : cu[i + 1]] to growing rollout handles[i], then predict the continuations.

        A growing rollout that has no room even after all possible evictions is halted: nothing more is appended to
        it or predicted for it.

        Args:
            handles: of growing rollouts, [n].
            tokens: of all of them, [cu[n]].
            cu: ends of each one's tokens, [n + 1], ascending from 0.
            window: most tokens of a continuation, at least 1, and of each branch.
            branches: most branches from a continuation.
            asked: rollouts of which a continuation is predicted, [n]; None: all.

        Raises:
            KeyError: a handle is not open. Nothing is appended then.
            ValueError: another argument is wrong. Nothing is appended then.
        """
        handles, cu = np.array(handles, np.int64), np.array(cu, np.int64)
        tokens = token_array(tokens)
        n = len(handles)
        if branches < 0:
            raise ValueError(f"branches must be 0 or more, got {branches}")
        if window < 1:
            raise ValueError(f"window must be at least 1 token, got {window}")
        if cu.shape != (n + 1,) or cu[0] != 0 or cu[-1] != len(tokens) or (cu[1:] < cu[:-1]).any():
            raise ValueError(f"{n} handles and {len(tokens)} tokens do not match cu {cu.tolist()}")
        asked = np.ones(n, np.bool_) if asked is None else np.array(asked, np.bool_)
        if asked.shape != (n,):
            raise ValueError(f"{n} handles do not match asked {asked.tolist()}")
        return self._stepper.step(handles, tokens, cu, window, branches, asked)

    def halted(self, handles: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return for each of these open handles [n] whether its rollout was halted for lack of room."""
        return self._arena.are_halted(np.asarray(handles, np.int64))

    def dump(self) -> bytes:
        """Return all prompts and rollouts as bytes, with settings; growing rollouts are saved as finished."""
        saved = []
        for name, entry in self._prompts:
            growing = {
                each: IndexedRollout(self._prompts.growing[handle].version, self._arena.text(handle))
                for each, handle in entry.growing.items()
            }
            saved.append(records.SavedPrompt(name, entry.tokens, {**entry.rollouts, **growing}))
        return records.write(self._settings, saved)

    @classmethod
    def load(cls, data: bytes) -> SuffixIndex:
        """Return the index that `dump` saved; ValueError for other data."""
        settings, saved = records.read(data)
        index = cls(**settings.as_arguments())
        for prompt in saved:
            index.put_prompt(prompt.name, prompt.tokens)
            for name, rollout in prompt.rollouts.items():
                index.insert(prompt.name, name, rollout.version, rollout.tokens)
        return index

    def _finished(self, prompt: Name, rollout: Name, version: int) -> IndexedRollout | None:
        """Return the finished rollout of this name. ValueError if one grows, TypeError if these are no names."""
        check_name(prompt)
        check_name(rollout)
        check_version(version)
        entry = self._prompts.get(prompt)
        if entry is not None and rollout in entry.growing:
            raise ValueError(f"rollout {rollout!r} of prompt {prompt!r} is growing already")
        return None if entry is None else entry.rollouts.get(rollout)

    @property
    def _bound(self) -> str:
        return f"max_tokens is {self._settings.max_tokens}, growing rollouts and their prompts stay"

    def _admit(self, prompt: Name, rollout: Name, cost: int, what: str) -> None:
        """Make room and free the name. ValueError, with nothing changed, if that is impossible."""
        entry = self._prompts.get(prompt)
        cost += TEXT_COST if entry is None else 0
        refusal = ValueError(f"no room for {what}: {self._bound}")
        if entry is not None and rollout in entry.rollouts:
            if cost > self._prompts.room(prompt):
                raise refusal
            self._prompts.forget(prompt, [rollout], keep=True)
        if not self._prompts.make_room(cost, prompt):
            raise refusal
