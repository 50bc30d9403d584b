"""Prompts of an index: their automata, cost and eviction, and the steps of their growing rollouts.

Importing this module imports numba.

An automaton from which a text was removed is freed at once, and rebuilt from the other texts when next needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from math import log2

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from kernels.suffix_index.arena import Arena, Full
from kernels.suffix_index.compiled.entry_points import DONE, NO_ROOM, branch, step
from kernels.suffix_index.compiled.layout import NOWHERE, RIVALS
from kernels.suffix_index.records import (
    TEXT_COST,
    Branches,
    Continuations,
    GrowingRollout,
    IndexedPrompt,
    IndexedRollout,
    IndexSettings,
    Name,
)

# An occurrence in the prompt itself has a tiny weight: it decides only where no rollout has been.
_PROMPT_WEIGHT = 2.0**-100
# Rollouts weigh between 2**-_DOUBLINGS and 2**_DOUBLINGS; beyond that the base version moves.
_DOUBLINGS = 60
# An eviction of finished rollouts frees at least 1 / _SLACK of the bound: each one causes rebuilding.
_SLACK = 16


class Prompts:
    """The prompts of an index by name, the least recently used first.

    arena: where their automata and growing rollouts lie. max_tokens, decay, reach: see SuffixIndex.
    """

    def __init__(self, arena: Arena, max_tokens: int, decay: float, reach: int) -> None:
        self._arena = arena
        self._max_tokens = max_tokens
        self._doublings = -log2(decay)  # of weight, from one version to the next
        self._reach = reach
        self._entries: dict[Name, IndexedPrompt] = {}
        self._cost = 0  # of everything but the tokens of growing rollouts
        self.growing: dict[int, GrowingRollout] = {}
        """The growing rollouts by handle."""
        self.unbuilt: set[Name] = set()
        """Prompts with growing rollouts whose automata have to be rebuilt before the next step."""

    def __iter__(self) -> Iterator[tuple[Name, IndexedPrompt]]:
        return iter(list(self._entries.items()))

    @property
    def used(self) -> int:
        """Cost of everything against the bound, in tokens."""
        return self._cost + self._arena.growing_tokens

    def get(self, name: Name) -> IndexedPrompt | None:
        """Return a prompt; None if unknown."""
        return self._entries.get(name)

    def use(self, name: Name) -> IndexedPrompt:
        """Return a prompt, created if unknown, and mark it as the most recently used."""
        entry = self._entries.pop(name, None)
        if entry is None:
            entry = IndexedPrompt()
            self._cost += entry.fixed_cost
        self._entries[name] = entry
        return entry

    def set_tokens(self, name: Name, tokens: NDArray[np.int32]) -> None:
        """Set a prompt's own tokens."""
        entry = self.use(name)
        self._release(name, entry)
        self._cost += len(tokens) - len(entry.tokens)
        entry.tokens = tokens
        entry.hashes[:] = 0
        entry.hashed = self._arena.teach(tokens, entry.hashes, 0)

    def add(self, name: Name, rollout: Name, added: IndexedRollout) -> bool:
        """Add a finished rollout of a new name. False if the automaton has no room for it; it is not added then."""
        entry = self.use(name)
        self._rebase(name, entry, added.version)
        if not entry.rollouts and not entry.growing:
            self.build([name])
        fits = True
        if entry.built:
            try:
                self._arena.extend(added.tokens, entry.end, self._weight(entry, added.version), self._reach)
            except Full:
                fits = False
        entry.rollouts[rollout] = added
        self._cost += added.cost
        if not fits:
            self.clear([name])
            if not self._try_build(name, entry):
                self.forget(name, [rollout])
                return False
        self._arena.teach(added.tokens, entry.hashes.copy(), entry.hashed)
        return True

    def open(self, name: Name, rollout: Name, version: int) -> int:
        """Begin a growing rollout of a new name; return its handle."""
        entry = self.use(name)
        self._rebase(name, entry, version)
        self.build([name])
        handle = self._arena.open(entry.end, self._weight(entry, version), entry.hashes, entry.hashed)
        entry.growing[rollout] = handle
        self.growing[handle] = GrowingRollout(name, rollout, version)
        self._cost += TEXT_COST
        return handle

    def close(self, handle: int, keep: bool) -> None:
        """End a growing rollout, and keep it as a finished one or not. KeyError: no such handle."""
        growing = self.growing.pop(handle)
        text = self._arena.close(handle)
        entry = self.use(growing.prompt)
        del entry.growing[growing.rollout]
        if not entry.growing:
            self.unbuilt.discard(growing.prompt)
        if keep:
            entry.rollouts[growing.rollout] = IndexedRollout(growing.version, text)
            self._cost += len(text)
            return
        self._cost -= TEXT_COST
        if len(text):
            self._release(growing.prompt, entry)
        if entry.empty:
            self.drop(growing.prompt)

    def forget(self, name: Name, rollouts: Collection[Name], *, keep: bool = False) -> None:
        """Remove finished rollouts of a prompt, and the prompt when nothing is left of it, unless `keep`."""
        if not rollouts:
            return
        entry = self._entries[name]
        for rollout in rollouts:
            self._cost -= entry.rollouts.pop(rollout).cost
        self._release(name, entry)
        if entry.empty and not keep:
            self.drop(name)

    def drop(self, name: Name) -> None:
        """Remove a prompt with all its texts."""
        entry = self._entries[name]
        self._release(name, entry)
        self._cost -= entry.fixed_cost + entry.finished_cost
        for handle in entry.growing.values():
            del self.growing[handle]
            self._arena.close(handle)
        del self._entries[name]
        self.unbuilt.discard(name)

    def room(self, keep: Name | None = None) -> int:
        """Return the room after evicting all that may be evicted, except the prompt `keep`."""
        fixed = sum(
            entry.fixed_cost for name, entry in self._entries.items() if entry.growing or name == keep
        )
        return self._max_tokens - fixed - self._arena.growing_tokens

    def make_room(self, needed: int, keep: Name | None = None) -> bool:
        """Evict until `needed` tokens fit: idle prompts but `keep`, least recently used first, then old rollouts.

        Returns False, and evicts nothing, if they cannot fit.
        """
        over = self.used + needed - self._max_tokens
        going = []
        for name, entry in self._entries.items():
            if over <= 0:
                break
            if not entry.growing and name != keep:
                going.append(name)
                over -= entry.fixed_cost + entry.finished_cost
        if over > 0 and needed > self.room(keep):
            return False
        for name in going:
            self.drop(name)
        if over > 0:
            self._forget_oldest(over + self._max_tokens // _SLACK, keep)
        return True

    def build(self, names: Collection[Name]) -> None:
        """Rebuild the automata of these prompts where necessary.

        If even cleared arrays have no room for all, which only happens with extremely repetitive texts, the prompts
        lose finished rollouts, then growing ones are halted and emptied, then the prompts lose their own tokens.
        """
        cleared = False
        while pending := [name for name in names if not self._entries[name].built]:
            for name in pending:
                entry = self._entries[name]
                if self._try_build(name, entry):
                    continue
                if cleared:
                    self._shrink(name, entry)
                else:
                    self.clear(names)
                    cleared = True

    def clear(self, keep: Collection[Name]) -> None:
        """Free all automata at once, and drop the less recently used half of the idle prompts but `keep`.

        Freed blocks of edges are not joined, so this also ends their fragmentation.
        """
        self._arena.clear()
        for entry in self._entries.values():
            entry.root = NOWHERE
        idle = [name for name, entry in self._entries.items() if not entry.growing and name not in keep]
        for name in idle[: (len(idle) + 1) // 2]:
            self.drop(name)
        self.unbuilt = {name for name, entry in self._entries.items() if entry.growing}

    def _forget_oldest(self, enough: int, keep: Name | None) -> None:
        """Remove finished rollouts, oldest versions first, until `enough` tokens are free or none is left."""
        finished = [
            (rollout.version, name, each)
            for name, entry in self._entries.items()
            for each, rollout in entry.rollouts.items()
        ]
        finished.sort(key=lambda each: each[0])
        enough = self.used - enough
        for _, name, rollout in finished:
            if self.used <= enough:
                return
            self.forget(name, [rollout], keep=name == keep)

    def _release(self, name: Name, entry: IndexedPrompt) -> None:
        if entry.built:
            self._arena.release(entry.root)
            entry.root = NOWHERE
            if entry.growing:
                self.unbuilt.add(name)

    def _rebase(self, name: Name, entry: IndexedPrompt, version: int) -> None:
        """Make a version that is too new for the base the new base of weights."""
        if not entry.rollouts and not entry.growing:
            entry.base = version
        elif (version - entry.base) * self._doublings > _DOUBLINGS:
            self._release(name, entry)
            entry.base = version

    def _weight(self, entry: IndexedPrompt, version: int) -> float:
        return 2.0 ** max(-_DOUBLINGS, min(_DOUBLINGS, (version - entry.base) * self._doublings))

    def _try_build(self, name: Name, entry: IndexedPrompt) -> bool:
        """Build the automaton of a prompt if there is none; return False if there is no room for it."""
        if entry.built:
            return True
        try:
            entry.root = self._arena.new_root()
            entry.end = self._arena.extend(entry.tokens, entry.root, _PROMPT_WEIGHT, self._reach)
            for rollout in entry.rollouts.values():
                weight = self._weight(entry, rollout.version)
                self._arena.extend(rollout.tokens, entry.end, weight, self._reach)
            for handle in entry.growing.values():
                weight = self._weight(entry, self.growing[handle].version)
                end = self._arena.extend(self._arena.text(handle), entry.end, weight, self._reach)
                self._arena.place(handle, end, weight)
        except Full:
            self._release(name, entry)
            return False
        self.unbuilt.discard(name)
        return True

    def _shrink(self, name: Name, entry: IndexedPrompt) -> None:
        """Remove some texts of a prompt that cannot be built."""
        filled = [handle for handle in entry.growing.values() if len(self._arena.text(handle))]
        if entry.rollouts:
            oldest = sorted(entry.rollouts, key=lambda rollout: entry.rollouts[rollout].version)
            for rollout in oldest[: (len(oldest) + 1) // 2]:
                self._cost -= entry.rollouts.pop(rollout).cost
        elif filled:
            for handle in filled:
                self._arena.halt(handle)
                self._arena.empty(handle)
        elif len(entry.tokens):
            self.set_tokens(name, entry.tokens[:0])
        else:
            raise RuntimeError(f"no room for the root of prompt {name!r}: the bound was not kept")


@dataclass(slots=True)
class Stepper:
    """Steps the growing rollouts of an index."""

    arena: Arena
    prompts: Prompts
    settings: IndexSettings

    def step(
        self,
        handles: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int32],
        cu: npt.NDArray[np.int64],
        window: int,
        branches: int,
        asked: npt.NDArray[np.bool_],
    ) -> Continuations:
        """Append tokens and predict continuations; see SuffixIndex.step. Shapes and ids are valid."""
        if branches:
            self.arena.arrays.scalars[RIVALS] = 1
        over_bound = self.prompts.used + len(tokens) > self.settings.max_tokens
        if over_bound or self.prompts.unbuilt:
            names = self._prompts_of(handles)
            if over_bound:
                self._make_room(handles, cu)
            self.prompts.build(names)
        n, settings, cleared = len(handles), self.settings, False
        found = Continuations(
            np.zeros((n, window), np.int32),
            np.zeros((n, window), np.float32),
            np.zeros(n, np.int32),
            np.zeros(n, np.int32),
        )
        progress = np.zeros(2, np.int64)
        while True:
            status = step(
                self.arena.arrays, handles, tokens, cu, asked, progress,
                settings.reach, settings.min_match, np.float32(settings.floor),
                found.tokens, found.shares, found.counts, found.matches,
            )  # fmt: skip
            if status == DONE:
                self.arena.relieve()
                return replace(found, branches=self._branch(handles, found, branches)) if branches else found
            if status != NO_ROOM:
                raise KeyError(int(handles[status]))
            try:
                self.arena.grow()
            except Full:
                if cleared:
                    self.arena.halt(int(handles[progress[0]]))
                else:
                    names = self._prompts_of(handles)
                    self.prompts.clear(names)
                    self.prompts.build(names)
                    cleared = True

    def _branch(self, handles: npt.NDArray[np.int64], found: Continuations, most: int) -> Branches:
        shape = (len(handles), most * found.tokens.shape[1])
        made = Branches(np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.full(shape, -1))
        branch(
            self.arena.arrays, handles, self.settings.min_match, np.float32(self.settings.floor),
            found.tokens, found.shares, found.counts, most, made.tokens, made.parents, made.shares,
        )  # fmt: skip
        return made

    def _make_room(self, handles: npt.NDArray[np.int64], cu: npt.NDArray[np.int64]) -> None:
        """Make room for the new tokens; if necessary, halt rollouts, the last ones first."""
        lengths = np.diff(cu)
        lengths[[self.arena.halted(handle) for handle in handles.tolist()]] = 0
        room = self.prompts.room()
        for i in reversed(range(len(handles))):
            if lengths.sum() <= room:
                break
            if lengths[i]:
                self.arena.halt(int(handles[i]))
                lengths[i] = 0
        self.prompts.make_room(int(lengths.sum()))

    def _prompts_of(self, handles: npt.NDArray[np.int64]) -> set[Name]:
        return {self.prompts.growing[handle].prompt for handle in handles.tolist()}
