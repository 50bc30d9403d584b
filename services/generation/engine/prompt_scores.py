"""Log-probabilities of the tokens of a prompt, of the model's own distribution, read while the prompt is computed.

A few rows at a time: the logits of a whole prompt would take gigabytes, with which nobody reckons.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

# Rows whose logits are in memory at once.
_ROWS = 128


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of the tokens of a prompt but the first, [n - 1], and the likeliest tokens there, [n - 1, k]."""

    logprobs: npt.NDArray[np.float32]
    top_token_ids: npt.NDArray[np.int64]
    top_logprobs: npt.NDArray[np.float32]

    @classmethod
    def empty(cls, tokens: int, most: int) -> PromptScores:
        """Return room for a prompt of so many tokens."""
        rows = max(0, tokens - 1)
        return cls(
            np.full(rows, np.nan, np.float32),
            np.zeros((rows, most), np.int64),
            np.zeros((rows, most), np.float32),
        )


@dataclass(slots=True)
class PromptReading:
    """Scores of one prompt as far as it was computed. `told` once they have left the worker."""

    prompt: list[int]
    most: int
    told: bool = False
    scores: PromptScores = field(init=False)

    def __post_init__(self) -> None:
        self.scores = PromptScores.empty(len(self.prompt), self.most)

    def read(
        self, hidden: torch.Tensor, begin: int, logits_of: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Score the tokens that follow the positions from `begin` on, of which `hidden` has the states, [m, H]."""
        rows = min(len(hidden), len(self.prompt) - 1 - begin)
        for first in range(0, rows, _ROWS):
            last = min(first + _ROWS, rows)
            logits = logits_of(hidden[first:last]).float()
            place = slice(begin + first, begin + last)
            following = self.prompt[place.start + 1 : place.stop + 1]
            total = logits.logsumexp(dim=-1, keepdim=True)
            index = torch.tensor(following, device=logits.device).unsqueeze(1)
            self.scores.logprobs[place] = (logits.gather(1, index) - total).squeeze(1).cpu().numpy()
            if self.most:
                best = logits.topk(self.most, dim=-1)
                self.scores.top_token_ids[place] = best.indices.cpu().numpy()
                self.scores.top_logprobs[place] = (best.values - total).cpu().numpy()
