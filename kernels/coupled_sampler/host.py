"""`sample.sample` in host memory: masks and proposals by numpy, tokens by the CPU's sampler.

Rows are copied only where something is masked in them or left out of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.coupled_sampler.masks import thresholds
from kernels.coupled_sampler.noise import MAX_POSITION, Domain
from kernels.coupled_sampler.proposals import RowProposals, accepts
from kernels.coupled_sampler.reference import coupled_argmax_reference
from kernels.coupled_sampler.verify import UNSAMPLED, verify

if TYPE_CHECKING:
    from kernels.coupled_sampler.sample import Edited

_ENTRIES = 1 << 22
"""Logits that are looked at together where proposals are decided."""
Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Step:
    """Logits [R, V]: the model's, and those that are kept of the edited ones, undivided; `lowest` [R] if masked."""

    values: Floats
    kept: Floats
    lowest: Floats | None
    seeds: Integers
    positions: Integers
    temperature: Floats
    drafts: Integers
    cu: Integers
    owner: Integers

    @property
    def divisor(self) -> Floats:
        """Divisor of each row, [R]; 1 where there is no temperature to divide by."""
        t = self.temperature
        found: Floats = np.where((t > 0) & (t < np.inf), t, np.float32(1))[self.owner]
        return found

    def sampled(
        self, index: Integers, chosen: NDArray[np.bool_], behind: Integers, logits: Floats, domain: Domain
    ) -> tuple[Integers, Integers]:
        """Sample the `chosen` requests [N] behind the first `behind` rows of each; `logits` are those rows'."""
        each = (np.diff(self.cu) - behind)[chosen]
        cu = np.concatenate(([0], np.cumsum(each)))
        drafted = np.ones(self.cu[-1], bool)
        drafted[self.cu[1:] - 1] = False
        drafts = np.full(self.cu[-1], UNSAMPLED)
        drafts[drafted] = self.drafts
        own = drafts[index[drafted[index]]]
        seeds, positions = self.seeds[chosen], (self.positions + behind)[chosen]
        return draw_tokens(logits, seeds, positions, self.temperature[chosen], own, cu, domain)


def sample_reference(
    logits: torch.Tensor,
    vectors: dict[str, torch.Tensor],
    cu_rows: torch.Tensor,
    edited: Edited | None,
    proposals: RowProposals | None,
    domain: Domain,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return tokens, counts, reused, logprobs, processed and lowest, as in Sampled, of checked arguments."""
    step = _step(logits, vectors, cu_rows, edited)
    if proposals is None:
        kept = np.ascontiguousarray(step.kept)
        tokens, counts = draw_tokens(
            kept, step.seeds, step.positions, step.temperature, step.drafts, step.cu, domain
        )
        reused = np.zeros_like(counts)
    else:
        tokens, counts, reused = _with_proposals(step, proposals, domain)
    found = torch.from_numpy(tokens)
    raw, processed = _logprobs(step, found)
    lowest = None if step.lowest is None else torch.from_numpy(step.lowest)
    return found, torch.from_numpy(counts), torch.from_numpy(reused), raw, processed, lowest


def _step(
    logits: torch.Tensor, vectors: dict[str, torch.Tensor], cu_rows: torch.Tensor, edited: Edited | None
) -> _Step:
    values = logits.detach().float().cpu().numpy()
    cu = cu_rows.numpy()
    named = {name: vector.numpy() for name, vector in vectors.items()}
    owner = np.repeat(np.arange(len(cu) - 1), np.diff(cu))
    kept = values
    if edited is not None and len(edited.rows):
        index = edited.rows.numpy()
        kept = values.copy()
        kept[index] = edited.logits.cpu().numpy()
        kept[index[~(values[index].max(axis=1) < np.inf)]] = np.nan
    step = _Step(
        values,
        kept,
        None,
        named["seeds"],
        named["positions"],
        named["temperature"],
        named["drafts"],
        cu,
        owner,
    )
    if named.keys().isdisjoint(("top_k", "top_p", "floors")):
        return step
    lowest, masked = _masked(step, named)
    return _Step(values, masked, lowest, *(getattr(step, name) for name in _REST))


_REST = ("seeds", "positions", "temperature", "drafts", "cu", "owner")


def _masked(step: _Step, named: dict[str, Any]) -> tuple[Floats, Floats]:
    """Return thresholds [R], and the logits with what lies below them at -inf."""
    t, n = step.temperature, len(step.temperature)
    k = named.get("top_k", np.zeros(n, np.int64))
    p = named.get("top_p", np.ones(n, np.float32))
    floor = named.get("floors", np.full(n, -np.inf, np.float32))
    on = (t > 0) & (t < np.inf) & (((k >= 1) & (k < step.values.shape[1])) | (p < 1) | (floor > -np.inf))
    index = np.flatnonzero(on[step.owner])
    lowest = np.full(len(step.owner), -np.inf, np.float32)
    if not len(index):
        return lowest, step.kept
    kept = step.kept.copy() if step.kept is step.values else step.kept
    own = step.owner[index]
    with np.errstate(over="ignore", under="ignore"):
        scaled = kept[index] / t[own, None]
        lowest[index] = thresholds(scaled, k[own], p[own], floor[own])
    kept[index] = np.where(scaled < lowest[index, None], np.float32(-np.inf), kept[index])
    return lowest, kept


def _with_proposals(
    step: _Step, proposals: RowProposals, domain: Domain
) -> tuple[Integers, Integers, Integers]:
    """Return tokens [R], counts and reused [N]."""
    proposed, residual = proposals.tokens.numpy(), proposals.residual.numpy()
    lead = _leading(step, proposals)
    tokens, counts = np.full(len(step.owner), UNSAMPLED, np.int64), lead.copy()
    place = np.arange(len(step.owner)) - step.cu[step.owner]
    taken = place < lead[step.owner]
    tokens[taken] = proposed[taken]
    # A request is over behind an accepted token that is not its draft.
    last = step.cu[:-1] + lead - 1
    live = lead == 0
    behind = np.flatnonzero((lead > 0) & (last + 1 < step.cu[1:]))
    # The drafts of request n start n entries before its rows.
    live[behind] = tokens[last[behind]] == step.drafts[last[behind] - behind]
    greedy = step.temperature == 0
    for chosen, own in ((live & ~residual, domain), (live & residual, Domain.RESIDUAL)):
        index = np.flatnonzero(chosen[step.owner] & ~taken)
        if not len(index):
            continue
        logits = step.kept[index]
        left_out = residual[step.owner[index]] & ~greedy[step.owner[index]] & (proposed[index] >= 0)
        rows = np.flatnonzero(left_out & (logits.max(axis=1) < np.inf))
        logits[rows, proposed[index[rows]]] = -np.inf
        tokens[index], more = step.sampled(index, chosen, lead, logits, own)
        counts[chosen] += more
    return tokens, counts, lead


def _leading(step: _Step, proposals: RowProposals) -> Integers:
    """Return how many proposals of each request are accepted before the first that is not, or is not there, [N].

    First rows are looked at together, then the second rows of the requests whose first was accepted, and so on.
    """
    proposed = proposals.tokens.numpy()
    each = np.diff(step.cu)
    found = np.zeros(len(each), np.int64)
    live, most = np.arange(len(each)), max(1, _ENTRIES // step.values.shape[1])
    while len(live):
        live = live[found[live] < each[live]]
        live = live[proposed[step.cu[live] + found[live]] >= 0]
        parts = [live[begin : begin + most] for begin in range(0, len(live), most)]
        live = np.concatenate(
            [part[_accepted(step, proposals, part, found[part])] for part in parts] or [live]
        )
        found[live] += 1
    return found


def _accepted(step: _Step, proposals: RowProposals, requests: Integers, place: Integers) -> NDArray[np.bool_]:
    """Return whether the proposals in these rows of some requests are accepted, [m]."""
    row = step.cu[requests] + place
    tokens, odds, raw = (part.numpy()[row] for part in (proposals.tokens, proposals.log_odds, proposals.raw))
    kept, t, position = step.kept[row], step.temperature[requests], step.positions[requests] + place
    each = np.arange(len(row))
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        sound = (t >= 0) & (t < np.inf) & (position >= 0) & (position <= MAX_POSITION)
        sound &= (kept.max(axis=1) < np.inf) & (kept[each, tokens] > -np.inf) & (odds < np.inf)
        values = np.where(raw[:, None], step.values[row], kept / step.divisor[row, None])
    best: NDArray[np.bool_] = kept.argmax(axis=1) == tokens
    return sound & np.where(t == 0, best, accepts(values, tokens, odds))


def draw_tokens(
    logits: Floats,
    seeds: Integers,
    positions: Integers,
    temperature: Floats,
    drafts: Integers,
    cu_rows: Integers,
    domain: Domain,
) -> tuple[Integers, Integers]:
    """Tokens [R] and counts [N] by the CPU's sampler, or by the definition where there is no numba."""
    if find_spec("numba") is not None:
        # Compiles or loads its code, which a process that samples on CUDA is spared.
        from kernels.coupled_sampler.cpu import coupled_verify

        return coupled_verify(
            logits, seeds.view(np.uint64), positions, temperature, drafts, cu_rows, domain=domain
        )
    each = np.diff(cu_rows)
    owner = np.repeat(np.arange(len(each)), each)
    place = np.arange(len(owner)) - cu_rows[owner]
    tokens = coupled_argmax_reference(
        logits, seeds.view(np.uint64)[owner], positions[owner] + place, temperature[owner], domain
    )
    counts = verify(tokens, drafts, cu_rows)
    return np.where(place < counts[owner], tokens, UNSAMPLED), counts


def _logprobs(step: _Step, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens' log-probabilities: of the model's logits, and of what is kept, divided; [R] each."""
    raw = torch.full((len(tokens),), torch.nan)
    index = torch.nonzero(tokens >= 0).squeeze(1)
    chosen = tokens[index]
    every = len(index) == len(tokens)
    values, kept = (torch.from_numpy(part) for part in (step.values, step.kept))
    raw[index] = _chosen(values if every else values[index], chosen)
    if step.kept is step.values and (step.temperature == 1).all():
        return raw, raw.clone()
    processed = torch.full_like(raw, torch.nan)
    divisor = torch.from_numpy(step.divisor)[index, None]
    processed[index] = _chosen((kept if every else kept[index]) / divisor, chosen)
    return raw, processed


def _chosen(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-softmax of each row at its token."""
    return values.gather(1, tokens.unsqueeze(1)).squeeze(1) - values.logsumexp(dim=-1)
