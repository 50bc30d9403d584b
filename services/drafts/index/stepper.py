"""One step of the growing rollouts: append what came, offer what may come.

Importing this module imports numba.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.drafts.index.archive import Settings
from services.drafts.index.arena import Arena, Full
from services.drafts.index.compiled import DONE, NO_ROOM, step
from services.drafts.index.names import Name
from services.drafts.index.offers import Offers
from services.drafts.index.prompts import Prompts


@dataclass(slots=True)
class Stepper:
    """Steps the growing rollouts of an index."""

    arena: Arena
    prompts: Prompts
    settings: Settings

    def step(
        self,
        handles: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int32],
        cu: npt.NDArray[np.int64],
        window: int,
    ) -> Offers:
        """See SuffixIndex.step; shapes and token ids are right. KeyError for a handle that is not open."""
        crowded = self.prompts.used + len(tokens) > self.settings.max_tokens
        if crowded or self.prompts.unbuilt:
            names = self._prompts_of(handles)
            if crowded:
                self._make_room(handles, cu)
            self.prompts.build(names)
        n, settings, cleared = len(handles), self.settings, False
        offers = Offers(
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
                offers.tokens, offers.shares, offers.counts, offers.matches,
            )  # fmt: skip
            if status == DONE:
                self.arena.relieve()
                return offers
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
