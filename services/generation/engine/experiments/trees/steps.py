"""Draft trees in the steps of an engine: sent from the core, laid out in a V1 runner, verified and forgotten."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode

from kernels.short_query_attention.race import AttentionName
from services.generation.engine.draft_forms import use_masks
from services.generation.engine.experiments.trees.attention import BRANCHES, BranchAttention, BranchLayout
from services.generation.engine.experiments.trees.sampling import (
    MOST_DRAFTED,
    sample_refusal,
    sample_trees,
    segments_of,
)
from services.generation.engine.experiments.trees.tree import DraftTree, chain_length
from services.generation.engine.model_support import worker_refusal
from services.generation.engine.sampling.rows import IntArray, Rows, put
from services.generation.engine.sampling.sampler import Verified, sample


class CoreTrees:
    """Trees on their way to the workers of an engine core. Where they are not `allowed`, chains are left."""

    def __init__(self, core: Any, *, allowed: bool) -> None:
        self._core = core
        self._allowed = allowed

    def put(self, drafts: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[int]]:
        """Send parents of branches to the workers; returns the drafts, cut to chains where trees are refused."""
        requests, trees, cut = self._core.scheduler.requests, dict[str, Sequence[int]](), dict(drafts)
        for sample_id, draft in drafts.items():
            if not isinstance(draft, DraftTree):
                continue
            extra = requests[sample_id].sampling_params.extra_args
            if self._allowed and len(draft) <= MOST_DRAFTED and sample_refusal(extra) is None:
                trees[sample_id], cut[sample_id] = draft.parents, draft.tokens
            else:
                cut[sample_id] = draft.tokens[: chain_length(draft.parents)]
        if trees:
            self._core.collective_rpc("set_form", args=(trees,))
        return cut


def on_cpu(worker: Any) -> TreeSteps:
    """Replace vLLM's attention by one that computes branches in copies of their blocks."""
    # Imported late, because only a CPU worker can import it.
    from services.generation.engine.experiments.trees.cpu_attention import use_trees

    return TreeSteps(use_trees(), lambda: "")


def on_gpu(worker: Any) -> TreeSteps:
    """Let our attention kernel take masks, if this worker has it."""
    BRANCHES.wanted = worker.attention is AttentionName.OURS
    use_masks(BRANCHES)

    def refusal() -> str:
        config = worker.vllm_config.compilation_config
        layers = config.static_forward_context.values()
        graphs = config.cudagraph_mode
        return worker_refusal(
            ours=all(getattr(layer.impl, "is_ours", False) for layer in layers if hasattr(layer, "impl")),
            kinds=len(worker.model_runner.kv_cache_config.kv_cache_groups),
            whole_graphs=graphs is not None and graphs.mixed_mode() is CUDAGraphMode.FULL,
            fused_output=bool(config.pass_config.fuse_attn_quant),
        )

    return TreeSteps(BRANCHES, refusal)


class TreeSteps:
    """Draft trees of the steps of one runner: set before a step, laid out in it, and forgotten after it."""

    def __init__(self, attention: BranchAttention, refusal: Callable[[], str]) -> None:
        """Verify trees with this attention; `refusal` says why the built model verifies only chains."""
        self._attention = attention
        self._refusal = refusal
        self.parents: Mapping[str, Sequence[int]] = {}
        """Parents of the next step's drafts, for the samples that have branches."""
        self._layout: BranchLayout | None = None

    @property
    def pending(self) -> bool:
        """True if some drafts of the next step have branches."""
        return bool(self.parents)

    def put(self, known: Mapping[str, Sequence[int]]) -> None:
        """Set the parents of the next step's drafts, for the samples that have branches."""
        self.parents = known

    def clear(self) -> None:
        """Forget the parents, because the next step has no drafts."""
        self.parents = {}

    def refusal(self) -> str:
        """Return why the model, which is built by now, verifies only chains; "" if it verifies trees."""
        return self._refusal()

    def lay_out(self, batch: Any, rows: Rows, starts: IntArray, positions: torch.Tensor) -> None:
        """Lay out the step that vLLM has prepared as one without trees.

        Args:
            batch: vLLM's batch.
            rows: layout by sample, with the drafts that were scheduled: the first tokens of a tree, again a tree.
            starts: index of each sample's first token in the step, and the number of its tokens, [n + 1].
            positions: positions of the step's tokens, which the model reads; the positions of branches are changed.
                vLLM has chosen the slots of their KV by then.
        """
        wanted, self.parents = self.parents, {}
        trees = {}
        for sample_id, parents in wanted.items():
            place = batch.req_id_to_index.get(sample_id)
            scheduled = parents if place is None else parents[: int(rows.cu[place + 1] - rows.cu[place]) - 1]
            if place is not None and chain_length(scheduled) < len(scheduled):
                trees[place] = scheduled
        self._layout = None
        if trees:
            computed = batch.num_computed_tokens_cpu[: len(rows.cu) - 1].astype(np.int64)
            self._layout = BranchLayout(rows, segments_of(rows, trees), starts, computed, trees)
        self._attention.begin(self._layout)
        if self._layout is not None:
            segments = self._layout.segments
            branches = np.flatnonzero(segments.forks[segments.rows.samples] >= 0)
            tokens, _, own = _places(self._layout, branches)
            there = put(positions.device, tokens=tokens, own=own)
            positions[there["tokens"]] = there["own"]

    def computed(self) -> None:
        """End the step's forward pass: later passes have no branches."""
        self._attention.computed()

    def sample(self, logits: torch.Tensor, rows: Rows, *given: Any) -> Verified:
        """Do as `sampler.sample`; with branches also move the KV of the accepted ones, and forget the step."""
        if self._layout is None:
            return sample(logits, rows, *given)
        verified = sample_trees(logits, self._layout.segments, *given)
        self._keep(self._layout, verified)
        return verified

    def _keep(self, layout: BranchLayout, verified: Verified) -> None:
        """Move the KV of accepted branches to the slots of a chain, and forget the step."""
        emitted = verified.rows
        assert emitted is not None
        forks = layout.segments.forks[layout.segments.rows.samples[emitted]]
        tokens, targets, _ = _places(layout, emitted[forks >= 0])
        self._attention.move(tokens, targets)
        self._layout = None


def _places(layout: BranchLayout, index: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return, for some rows, their tokens in the step, the tokens whose slots a chain would use, and positions."""
    rows = layout.rows
    places = rows.samples[index]
    depths = layout.segments.rows.row_positions[index] - rows.positions[places]
    starts = layout.starts[places]
    return starts + rows.offsets[index], starts + depths, layout.computed[places] + depths
