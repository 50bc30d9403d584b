"""Steps of the growing rollouts: append the new tokens, predict their continuations.

Importing this module imports numba.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kernels.suffix_index.archive import IndexSettings
from kernels.suffix_index.arena import Arena, Full
from kernels.suffix_index.compiled.entry_points import DONE, NO_ROOM, branch, step
from kernels.suffix_index.compiled.layout import RIVALS
from kernels.suffix_index.continuations import Branches, Continuations
from kernels.suffix_index.names import Name
from kernels.suffix_index.prompts import Prompts


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
                self.arena.arrays, handles, tokens, cu, progress,
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
        """Make room for the new tokens, by halting rollouts from the last on if need be."""
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
