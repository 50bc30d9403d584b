"""Coupled sampling of a step on the device of its logits: noise, masks, arg-max and verification.

    sampled = sample(logits, seeds, positions, temperature, drafts, cu_rows, top_p=top_p)

On CUDA two kernels do it (more before them where there are masks), and no noise, probability or mask tensor is ever
in memory. Elsewhere numpy computes masks and proposals, and the CPU sampler draws tokens. Both give the same
tokens, bit for bit; log-probabilities agree to about 1e-5. `runner_up` gives the second token of a row and the
margin by which it lost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.backend import FLOATS, INTEGERS, Backend, check, check_contiguous, check_device, choose
from kernels.coupled_sampler.noise import MAX_POSITION, Domain
from kernels.coupled_sampler.proposals import RowProposals, accepts, gumbels
from kernels.coupled_sampler.reference import (
    MOST_ENTRIES,
    UNSAMPLED,
    check_ragged,
    coupled_argmax_reference,
    floors,
    thresholds,
    verify,
)
from kernels.transfer import Layout, downloaded, layout_of, uploaded, views

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
_ENTRIES = 1 << 22
"""Most logits that are processed together where proposals are decided."""
_REST = ("seeds", "positions", "temperature", "drafts", "cu", "owner")
"""Fields of `_Step` that masks do not change."""


@dataclass(frozen=True, slots=True)
class Edited:
    """Logits of some rows, [E, V] float32 where the others are, after penalties and masks by token.

    rows [E] int64 in host memory, ascending. Their tokens are sampled from these logits; a row whose own logits
    cannot be sampled from (NaN or +inf) cannot be sampled from edited ones either.
    """

    rows: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class Sampled:
    """R rows, N requests: request n emits tokens[cu_rows[n] : cu_rows[n] + counts[n]].

    tokens     [R] int64; UNSAMPLED behind the emitted ones, INVALID where nothing could be sampled
    counts     [N] int64, accepted drafts + 1
    reused     [N] int64, how many of these tokens, from the first on, are accepted proposals
    logprobs   [R] float32: log-softmax of the logits at the token; NaN without a token
    processed  [R] float32: the same of edited logits / T (T = 0: undivided) among the entries that the masks keep
    lowest     [R] float32: the masks' thresholds of those / T; None if there are no masks
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    reused: torch.Tensor
    logprobs: torch.Tensor
    processed: torch.Tensor
    memory: torch.Tensor | None = None
    """The uint8 block that holds all five, if there is one."""
    lowest: torch.Tensor | None = None
    """`to_host` does not move it."""

    def to_host(self) -> Sampled:
        """Return the same in host memory, by one copy if there is `memory`; waits for the device."""
        if self.memory is None:
            parts = ("tokens", "counts", "reused", "logprobs", "processed")
            on_host = self.tokens.device.type == "cpu"
            return self if on_host else replace(self, **{name: getattr(self, name).cpu() for name in parts})
        memory = downloaded(self.memory)
        layout, _ = outputs_layout(len(self.tokens), len(self.counts))
        return replace(self, **views(memory, layout), memory=memory)


def sample(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    drafts: torch.Tensor,
    cu_rows: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    edited: Edited | None = None,
    proposals: RowProposals | None = None,
    domain: Domain = Domain.TOKEN,
    backend: Backend | str | None = None,
) -> Sampled:
    """Sample the target's tokens and verify drafts, as cpu.coupled_verify does.

    Args:
        logits: [R, V] float32, bfloat16 or float16, V up to 2**22, the last axis contiguous. -inf never wins.
        seeds: [N] int64, read as unsigned. Seeds, positions, temperature, drafts, top_k and top_p may each be on
        the
            device of the logits or in host memory. All vectors in host memory go to the device in one copy, without
            waiting for it.
        positions: [N] int64, of the first row of each request.
        temperature: [N] float32; 0 is greedy, without noise or masks.
        drafts: [R - N] int64, one request after the other.
        cu_rows: [N + 1] int64 in host memory: request n has rows cu_rows[n] : cu_rows[n + 1], one for each draft
            and one more.
        top_k: [N] int64; below 1 or not below V is off. reference.py has the rules.
        top_p: [N] float32; off unless below 1.
        min_p: [N] float32 in host memory; off unless above 0.
        edited: logits from which some rows are sampled instead of `logits`.
        proposals: tokens to accept by their probability. proposals.py has the rule.
        domain: domain of the noise.
        backend: see kernels/backend.py.

    Raises:
        ValueError: a wrong shape, dtype or device.
    """
    requests = len(cu_rows) - 1
    vectors = {"seeds": seeds, "positions": positions, "temperature": temperature, "drafts": drafts}
    _check(logits, cu_rows, vectors, edited, proposals)
    host = torch.device("cpu")
    for name, limit, dtypes in (("top_k", top_k, INTEGERS), ("top_p", top_p, (torch.float32,))):
        if limit is not None:
            check(name, limit, (requests,), dtypes)
            vectors[name] = limit
    for name, vector in vectors.items():
        if vector.device != host:
            check_device(logits.device, **{name: vector})
    if min_p is not None:
        check("min_p", min_p, (requests,), (torch.float32,))
        check_device(host, min_p=min_p)
        vectors["floors"] = torch.from_numpy(floors(min_p.numpy()))
    if choose(logits.device, backend) is not Backend.TRITON:
        there = {name: vector.to(host) for name, vector in vectors.items()}
        if proposals is not None:
            tokens, odds = proposals.tokens.to(host), proposals.log_odds.to(host)
            proposals = replace(proposals, tokens=tokens, log_odds=odds)
        *results, lowest = sample_reference(logits, there, cu_rows, edited, proposals, domain)
        tokens, counts, reused, raw, processed = (
            part.to(logits.device) for part in results if part is not None
        )
        lowest = None if lowest is None else lowest.to(logits.device)
        return Sampled(tokens, counts, reused, raw, processed, lowest=lowest)
    return _on_device(logits, vectors, cu_rows, edited, proposals, domain)


def _on_device(
    logits: torch.Tensor,
    vectors: dict[str, torch.Tensor],
    cu_rows: torch.Tensor,
    edited: Edited | None,
    proposals: RowProposals | None,
    domain: Domain,
) -> Sampled:
    from kernels.coupled_sampler.triton_sample import BY_RAW, RESIDUAL, LogitPart, sample_triton

    rows, requests = len(logits), len(cu_rows) - 1
    vectors["first_rows"] = cu_rows
    vectors["owners"] = torch.repeat_interleave(torch.arange(requests), cu_rows.diff())
    if proposals is not None:
        vectors["proposed"], vectors["log_odds"] = proposals.tokens, proposals.log_odds
        flags = proposals.raw * BY_RAW + proposals.residual[vectors["owners"]] * RESIDUAL
        vectors["flags"] = flags.to(torch.int32)
    plain = torch.arange(rows)
    if edited is not None:
        vectors["edited"], vectors["edited_rows"] = edited.rows, torch.arange(len(edited.rows))
        plain = torch.from_numpy(np.setdiff1d(plain.numpy(), edited.rows.numpy(), assume_unique=True))
    vectors["plain"] = plain
    there = {name: vector.contiguous() for name, vector in uploaded(vectors, logits.device).items()}
    parts = [LogitPart(logits, there["plain"], there["plain"])] if len(plain) else []
    if edited is not None and len(edited.rows):
        parts.append(LogitPart(edited.logits, there["edited"], there["edited_rows"]))
    layout, size = outputs_layout(rows, requests)
    memory = torch.empty(size, dtype=torch.uint8, device=logits.device)
    lowest = sample_triton(logits, there, parts, views(memory, layout), domain)
    return Sampled(**views(memory, layout), memory=memory, lowest=lowest)


def _check(
    logits: torch.Tensor,
    cu_rows: torch.Tensor,
    vectors: dict[str, torch.Tensor],
    edited: Edited | None,
    proposals: RowProposals | None,
) -> None:
    requests = len(cu_rows) - 1
    check("logits", logits, (None, None), FLOATS)
    check_contiguous(logits=logits)
    if not 1 <= logits.shape[1] <= MOST_ENTRIES:
        raise ValueError(f"logits must have 1..{MOST_ENTRIES} columns, got {logits.shape[1]}")
    check("cu_rows", cu_rows, (None,), (torch.int64,))
    check_device(torch.device("cpu"), cu_rows=cu_rows)
    check("drafts", vectors["drafts"], (None,), (torch.int64,))
    check_ragged(len(logits), len(vectors["drafts"]), cu_rows.numpy())
    check("seeds", vectors["seeds"], (requests,), (torch.int64,))
    check("positions", vectors["positions"], (requests,), (torch.int64,))
    check("temperature", vectors["temperature"], (requests,), (torch.float32,))
    if edited is not None:
        check("edited.rows", edited.rows, (None,), (torch.int64,))
        check("edited.logits", edited.logits, (len(edited.rows), logits.shape[1]), (torch.float32,))
        check_device(logits.device, **{"edited.logits": edited.logits})
        check_contiguous(**{"edited.logits": edited.logits})
        index = edited.rows.numpy()
        if len(index) and not (index[0] >= 0 and index[-1] < len(logits) and (np.diff(index) > 0).all()):
            raise ValueError(f"edited.rows must ascend within the {len(logits)} rows")
    if proposals is not None:
        proposals.check(len(logits), requests, logits.shape[1], logits.device)


def outputs_layout(rows: int, requests: int) -> tuple[Layout, int]:
    """Return the layout of the results of a step in one block, and its size in bytes."""
    return layout_of(
        tokens=(rows, torch.int64),
        counts=(requests, torch.int64),
        reused=(requests, torch.int64),
        logprobs=(rows, torch.float32),
        processed=(rows, torch.float32),
    )


@dataclass(frozen=True, slots=True)
class _Step:
    """A step in host memory.

    `values` [R, V] are the model's logits; `kept` the edited ones, not divided, -inf where a mask drops them;
    `lowest` [R] the thresholds if there are masks.
    """

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
    """Return tokens, counts, reused, logprobs, processed and lowest, as in Sampled; arguments are checked.

    Rows are copied only where something is masked in them or left out of them.
    """
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


def _masked(step: _Step, named: dict[str, Any]) -> tuple[Floats, Floats]:
    """Return thresholds [R], and the logits with -inf for the entries below them."""
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
    """Return how many proposals of each request are accepted before the first rejected or missing one, [N].

    First rows are checked together, then the second rows of the requests whose first was accepted, and so on.
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
    """Return True for each accepted proposal, [m], of row `place` of each of these requests."""
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
    """Return tokens [R] and counts [N] of the CPU sampler, or of the reference without numba."""
    if find_spec("numba") is not None:
        # Imported late: it compiles or loads code that a process on CUDA does not need.
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
    """Return the tokens' log-probabilities [R]: by the model's logits, and by the kept entries divided by T."""
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
    """Return the log-softmax of each row at its token."""
    return values.gather(1, tokens.unsqueeze(1)).squeeze(1) - values.logsumexp(dim=-1)


def runner_up(
    values: torch.Tensor,
    winners: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    noisy: torch.Tensor,
    backend: Backend | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token with the second score of each row, and the margin by which it lost.

    Coupled sampling draws the arg-max of logits / T plus noise. Another policy near this one draws another token
    only where the second score is nearly the first, and then it is nearly always the second. Without another token
    the winner is its own runner-up, and the margin is infinite.

    Args:
        values: [n, V] float32, logits / T after masks; the winners' entries are overwritten.
        winners: [n] int64, the drawn tokens.
        seeds: [n] int64, read as unsigned.
        positions: [n] int64, of the response.
        noisy: [n] bool; False for greedy rows, whose scores are logits. All vectors are where `values` are.
        backend: see kernels/backend.py.

    Returns:
        tokens [n] int64, margins [n] float32, at least 0.
    """
    n, places = len(values), winners.unsqueeze(1)
    best = values.gather(1, places).squeeze(1)
    values.scatter_(1, places, -torch.inf)
    drawn = sample(
        values,
        seeds,
        positions,
        noisy.to(torch.float32),
        torch.empty(0, dtype=torch.int64),
        torch.arange(n + 1),
        backend=backend,
    )
    there = drawn.tokens >= 0
    tokens = torch.where(there, drawn.tokens, winners)
    second = values.gather(1, tokens.unsqueeze(1)).squeeze(1)
    noise = gumbels(seeds, positions, winners) - gumbels(seeds, positions, tokens)
    margins = (best.double() - second) + torch.where(noisy, noise, torch.zeros_like(noise))
    return tokens, torch.where(there, margins.clamp(min=0), torch.inf).float()
