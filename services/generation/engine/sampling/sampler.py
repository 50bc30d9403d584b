"""Sample tokens from logits: penalties and masks, then the coupled arg-max with verification.

One row of logits is one position of one sample. A sample with k draft tokens has k + 1 rows, in order: row j
was computed with the first j draft tokens in place, so it is the target's distribution after them. Plain
decoding is the case k = 0 for every sample; there is no other code path, and that is what makes speculation on
and off agree token for token (DESIGN section 4). In the same step samples may ask for rejection instead, or take
over tokens of a cached rollout before the coupled sampling of the rows behind those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.generation.engine.sampling.constraints import RowMasks, edit
from services.generation.engine.sampling.device_sampler import draw
from services.generation.engine.sampling.draw_settings import DrawSettings
from services.generation.engine.sampling.likeliest import likeliest
from services.generation.engine.sampling.near_ties import with_runners_up
from services.generation.engine.sampling.noise import CachedRollout, SampleNoise
from services.generation.engine.sampling.penalties import Histories
from services.generation.engine.sampling.proposed import proposals_of
from services.generation.engine.sampling.recorded import DraftsOfRow
from services.generation.engine.sampling.rows import IntArray, Rows


@dataclass(frozen=True, slots=True)
class Verified:
    """Tokens of a step: sample i emits `counts[i]` tokens, `tokens[cu[i] : cu[i] + counts[i]]`.

    Where the step has draft trees, `rows` are those that the samples emit, one after another.
    `logprobs` [R] is filled for emitted rows. NaN marks a row from which nothing could be sampled. The first
    `reused[i]` tokens are taken over from a cached rollout. `top_tokens` and `top_logprobs` [R, K] have the
    likeliest tokens of emitted rows, as many as the sample asks for, then NO_TOKEN; or, of a sample that asks for
    near-ties, the runner-up and its margin.
    """

    tokens: IntArray
    counts: IntArray
    reused: IntArray
    logprobs: npt.NDArray[np.float32]
    top_tokens: IntArray
    top_logprobs: npt.NDArray[np.float32]
    rows: IntArray | None = None

    def sources(self, rows: Rows, width: int) -> IntArray:
        """Return the rows that each sample emits, [n, width]; behind its last one there is any row."""
        if self.rows is None:
            found: IntArray = np.minimum(rows.cu[:-1, None] + np.arange(width), rows.cu[-1] - 1)
            return found
        first = np.cumsum(self.counts) - self.counts
        return self.rows[np.minimum(first[:, None] + np.arange(width), len(self.rows) - 1)]


def sample(
    logits: torch.Tensor,
    rows: Rows,
    settings: DrawSettings,
    noise: list[SampleNoise],
    followed: Mapping[int, CachedRollout],
    masks: RowMasks | None = None,
    histories: Histories | None = None,
    recorded: Mapping[int, DraftsOfRow] | None = None,
) -> Verified:
    """Verify the drafts and sample the next token of every sample.

    Args:
        logits: [R, V], any float type; left as it is.
        rows: the layout.
        settings: temperature and masks of the samples.
        noise: one per sample.
        followed: by its index, the cached rollout of each sample that has taken over all its tokens so far.
        masks: of the rows of samples that follow a grammar.
        histories: of the samples; may be None if none has penalties.
        recorded: by its index, what a sample's drafts are verified by beside their probability now.
    """
    edited = edit(logits, rows, noise, masks, histories)
    proposals = proposals_of(rows, noise, followed, recorded)
    drawn = draw(logits, rows, settings, noise, edited, proposals)
    tokens, counts = drawn.tokens.numpy(), drawn.counts.numpy()
    by_processed = np.fromiter((item.processed_logprobs for item in noise), bool, len(noise))
    logprobs = np.where(by_processed[rows.samples], drawn.processed.numpy(), drawn.logprobs.numpy())
    reused = np.zeros(len(noise), np.int64)
    index = list(followed)
    reused[index] = drawn.reused.numpy()[index]
    top = likeliest(logits, rows, counts, noise, settings, edited, drawn.lowest)
    told = with_runners_up(top, logits, rows, (tokens, counts), noise, settings, edited, drawn.lowest)
    return Verified(tokens, counts, reused, logprobs, *told)
