"""Coupled sampling of a step where the logits are: masks, noise, arg-max, log-probabilities and verification.

    sampled = sample(logits, seeds, positions, temperature, drafts, cu_rows, top_p=top_p)

On CUDA two kernels do it (more before them where there are masks) and no noise, probability or mask tensor is ever
in memory; elsewhere masks.py, proposals.py, cpu.py and torch. Both give the same tokens, to the bit;
log-probabilities agree to about 1e-5. What comes from host memory goes to the device in one copy, which nobody
waits for, and `to_host` brings the result back in one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from kernels.backend import Backend, choose
from kernels.checks import FLOATS, INTEGERS, check, check_contiguous, check_device
from kernels.coupled_sampler.masks import MOST_ENTRIES, floors
from kernels.coupled_sampler.noise import Domain
from kernels.coupled_sampler.proposals import RowProposals
from kernels.coupled_sampler.verify import check_ragged
from kernels.transfer import Layout, downloaded, layout_of, uploaded, views


@dataclass(frozen=True, slots=True)
class Edited:
    """Logits of some rows, [E, V] float32 where the others are, after penalties and masks by token.

    rows [E] int64 in host memory, rising. A token is sampled from these; a row whose own logits cannot be sampled
    from (NaN or +inf) cannot be whatever these are.
    """

    rows: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class Sampled:
    """R rows, N requests: request n emits tokens[cu_rows[n] : cu_rows[n] + counts[n]].

    tokens     [R] int64; UNSAMPLED behind the emitted ones, INVALID where nothing could be sampled
    counts     [N] int64, accepted drafts + 1
    reused     [N] int64, how many of those, from the first on, are accepted proposals
    logprobs   [R] float32: log-softmax of the logits at the token; NaN where there is none
    processed  [R] float32: the same of edited logits / T (T = 0: undivided) among the entries that the masks keep
    lowest     [R] float32: the masks' thresholds of those / T; None if there are no masks
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    reused: torch.Tensor
    logprobs: torch.Tensor
    processed: torch.Tensor
    memory: torch.Tensor | None = None
    """The block that all five lie in, if they do, uint8."""
    lowest: torch.Tensor | None = None
    """Stays where it is."""

    def to_host(self) -> Sampled:
        """Return the same in host memory, by one copy; waits for the device."""
        if self.memory is None:
            return self
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
            device of the logits or in host memory.
        positions: [N] int64, of the first row of each request.
        temperature: [N] float32; 0 is greedy, without noise or masks.
        drafts: [R - N] int64, one request after the other.
        cu_rows: [N + 1] int64 in host memory: request n has rows cu_rows[n] : cu_rows[n + 1], one for each draft
            and one more.
        top_k: [N] int64; below 1 or not below V is off. masks.py has the rules.
        top_p: [N] float32; off unless below 1.
        min_p: [N] float32 in host memory; off unless above 0.
        edited: what some rows are sampled from instead of `logits`.
        proposals: tokens to accept by their probability. proposals.py has the rule.
        domain: of the noise.
        backend: see kernels/backend.py.

    Raises:
        ValueError: a shape, dtype or device that does not fit.
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
        from kernels.coupled_sampler.host import sample_reference

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
    from kernels.coupled_sampler.triton_sample import LogitPart, sample_triton
    from kernels.coupled_sampler.triton_scan import BY_RAW, RESIDUAL

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
            raise ValueError(f"edited.rows must rise within the {len(logits)} rows")
    if proposals is not None:
        proposals.check(len(logits), requests, logits.shape[1], logits.device)


def outputs_layout(rows: int, requests: int) -> tuple[Layout, int]:
    return layout_of(
        tokens=(rows, torch.int64),
        counts=(requests, torch.int64),
        reused=(requests, torch.int64),
        logprobs=(rows, torch.float32),
        processed=(rows, torch.float32),
    )
