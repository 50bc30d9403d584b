"""EAGLE-3 draft model: a head trained on the target's output, which reads the target's hidden features.

Row t of the head reads the target's features of token t together with token t + 1, and predicts token t + 2; its
KV is at slot t of the sample's blocks. `Features` keeps the target's features, `Eagle3Model` is the head, and
`Eagle3` drafts with it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.compilation.backends import set_model_tag
from vllm.config import SpeculativeConfig, get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.reload.inplace import reload_weights

from services.contracts.drafter_checkpoint import layers_of, load, unlike_target
from services.generation.engine.draft_models.draft_loop import DraftPass, DraftRows, on
from services.generation.engine.draft_models.interface import StaleDrafter, UnsupportedDrafter
from services.generation.engine.sampling.rows import IntArray
from services.generation.engine.types import DraftRequest, DraftResult, Eagle3Options


class _FeatureLayer(AttentionLayerBase):
    """Layer that looks like an attention layer to vLLM, so that vLLM allocates blocks for it; it is never run."""

    def __init__(self, like: Any) -> None:
        self._like = like
        # In one group with the target's layers, so that metadata is built once for all.
        self.num_heads = like.num_heads
        self.kv_cache = torch.empty(0)

    def get_attn_backend(self) -> Any:
        """Return the same as vLLM's attention layer."""
        return self._like.get_attn_backend()

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """Return the same as vLLM's attention layer."""
        return self._like.get_kv_cache_spec(vllm_config)


class Features:
    """Features of the target by slot of the paged KV; created before the KV cache.

    They are kept in the engine's KV blocks, as if they were the KV of further layers. So vLLM counts their memory
    before it sizes the cache, and they are found in the prefix cache, moved to another engine, dropped, and
    computed again after a preemption together with the target's KV. The head can therefore begin to draft for any
    sample at any time. Each rank of a tensor-parallel group keeps a share of them.
    """

    def __init__(self, runner: Any, layers: Sequence[int]) -> None:
        """Declare a layer for features to vLLM.

        Args:
            runner: vLLM's model runner, its model loaded.
            layers: layers whose hidden states are kept, ascending; i stands for transformers' hidden_states[i].

        Raises:
            UnsupportedDrafter: the target cannot return its hidden states, or has several kinds of KV.
        """
        target, config = runner.get_model(), runner.vllm_config
        if not hasattr(target, "set_aux_hidden_state_layers"):
            raise UnsupportedDrafter(f"{type(target).__name__} cannot return its hidden states")
        if config.parallel_config.pipeline_parallel_size != 1:
            raise UnsupportedDrafter("the target's layers are on several devices")
        attention = get_layers_from_vllm_config(config, Attention)
        kinds = {layer.get_kv_cache_spec(config) for layer in attention.values()}
        if len(kinds) != 1:
            raise UnsupportedDrafter("the target has several kinds of KV")
        self.spec: Any = kinds.pop()
        if self.spec.dtype != runner.dtype:
            raise UnsupportedDrafter(f"the KV is {self.spec.dtype}, the hidden states are {runner.dtype}")
        self._ranks = get_tensor_model_parallel_world_size()
        self.width = len(layers) * runner.model_config.get_hidden_size()
        self._share = -(-self.width // self._ranks)
        # Values of one token in the KV of one layer.
        per_layer = self.spec.page_size_bytes // self.spec.block_size // runner.dtype.itemsize
        self._per_layer = per_layer
        like, context = next(iter(attention.values())), config.compilation_config.static_forward_context
        first = runner.model_config.get_total_num_hidden_layers() + 1
        self._layers = {
            f"model.features.{first + i}": _FeatureLayer(like) for i in range(-(-self._share // per_layer))
        }
        context.update(self._layers)
        self._flat: list[torch.Tensor] = []
        target.set_aux_hidden_state_layers(tuple(layers))
        # The target then returns them in addition to its output.
        runner.use_aux_hidden_state_outputs = True

    def keep(self, states: Sequence[torch.Tensor], count: int) -> None:
        """Store the features of the target's last forward pass; call it within that pass's forward context.

        Args:
            states: hidden states of each layer, [rows, hidden], padded.
            count: number of rows that are tokens.
        """
        slots = get_forward_context().slot_mapping[next(iter(self._layers))][:count]
        whole = torch.cat([state[:count] for state in states], dim=-1)
        begin = get_tensor_model_parallel_rank() * self._share if self._ranks > 1 else 0
        share = whole[:, begin : begin + self._share]
        for flat, part in zip(self._by_slot(), share.split(self._per_layer, dim=1), strict=False):
            flat[:, : part.shape[1]].index_copy_(0, slots, part)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the features at some slots, [rows, width]."""
        share = torch.cat([flat[slots] for flat in self._by_slot()], dim=1)[:, : self._share]
        if self._ranks > 1:
            share = tensor_model_parallel_all_gather(share.contiguous(), dim=-1)
        return share[:, : self.width]

    def _by_slot(self) -> list[torch.Tensor]:
        """Return the memory of each layer as one row per slot; the rows of a block are contiguous, like its KV."""
        if not self._flat:
            for layer in self._layers.values():
                cache = layer.kv_cache
                order = sorted(range(cache.ndim), key=lambda axis: (-cache.stride(axis), axis))
                self._flat.append(cache.permute(order).view(-1, self._per_layer))
        return self._flat


class Eagle3Model:
    """EAGLE-3 head: `fc` of features, one layer, `norm` and `lm_head`; the embedding is the target's.

    The head is vLLM's, without vLLM's speculation: it is built from a copy of the engine's configuration that has a
    speculative configuration, so that its attention layer is one more of the engine's layers.
    """

    def __init__(self, runner: Any, options: Eagle3Options) -> None:
        """Load the head.

        Args:
            runner: vLLM's model runner, its model loaded and its KV not yet.
            options: options with the checkpoint.

        Raises:
            CorruptCheckpoint: the checkpoint is invalid.
            UnsupportedDrafter: it is not a drafter for this target, or the target cannot have a drafter.
        """
        config, tensors = load(Path(options.checkpoint))
        if faults := unlike_target(config, _facts(runner)):
            raise UnsupportedDrafter(
                f"{options.checkpoint} is no drafter for this model: {'; '.join(faults)}"
            )
        self.features = Features(runner, layers_of(config))
        spec = SpeculativeConfig(
            method="eagle3",
            model=options.checkpoint,
            num_speculative_tokens=options.most_tokens,
            target_model_config=runner.model_config,
            target_parallel_config=runner.vllm_config.parallel_config,
        )
        self._config = copy.copy(runner.vllm_config)
        self._config.speculative_config = spec
        before = set(get_layers_from_vllm_config(self._config, Attention))
        with set_current_vllm_config(self._config), set_model_tag("eagle3"):
            self._model: Any = get_model(vllm_config=self._config, model_config=spec.draft_model_config)
        self._require_kv_of_target(before)
        # A single layer that is called with varying numbers of rows: compiled graphs would not pay for themselves.
        self._model.model.do_not_compile = True
        inner = self._model.model
        _lend(inner, "embed_tokens", runner.get_model().model.embed_tokens)
        # vLLM shares one rotary embedding among all layers with the same parameters.
        attention = inner.layers[0].self_attn
        _lend(attention, "rotary_emb", attention.rotary_emb)
        # Counted from the checkpoint: kernels for CPU pack weights, and then no parameter has them.
        self.nbytes = sum(
            each.numel() * (runner.dtype.itemsize if each.is_floating_point() else each.element_size())
            for name, each in tensors.items()
            if name != "t2d"
        )

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        """Project features to the input of the layer, [rows, hidden]."""
        hidden: torch.Tensor = self._model.combine_hidden_states(features)
        return hidden

    def run(
        self, tokens: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a pass within its forward context; returns the inputs of the logits and of the next step.

        Args:
            tokens: token after each position, [rows].
            positions: positions of the hidden states, [rows].
            hidden: hidden states from `combine` or from an earlier step, [rows, hidden].
        """
        found: tuple[torch.Tensor, torch.Tensor] = self._model(tokens, positions, hidden)
        return found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits over the whole vocabulary, [rows, V], -inf for tokens that the head lacks."""
        found: torch.Tensor = self._model.compute_logits(hidden)
        return found

    def swap(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load weights in place."""
        with set_current_vllm_config(self._config):
            reload_weights(self._config, self._model, iter(tensors.items()), None, True)

    def _require_kv_of_target(self, before: set[str]) -> None:
        layers = get_layers_from_vllm_config(self._config, Attention)
        for name, layer in layers.items():
            spec = layer.get_kv_cache_spec(self._config)
            if name not in before and spec != self.features.spec:
                raise UnsupportedDrafter(f"the drafter's KV is {spec}, the target's {self.features.spec}")


def _lend(module: torch.nn.Module, name: str, part: torch.nn.Module) -> None:
    """Let a module use another one that is not a submodule, so that loading its weights skips the target's."""
    delattr(module, name)
    object.__setattr__(module, name, part)


def _facts(runner: Any) -> dict[str, int]:
    """Return the traits of the target with which a draft model must agree."""
    config = runner.model_config
    return {
        "hidden_size": config.get_hidden_size(),
        "vocab_size": config.get_vocab_size(),
        "head_dim": config.get_head_size(),
        "num_key_value_heads": config.get_total_num_kv_heads(),
        "num_hidden_layers": config.get_total_num_hidden_layers(),
    }


def allot(missing: IntArray, budget: int) -> IntArray:
    """Return how many missing tokens of each sample are computed before this step, [n].

    Samples that miss the fewest come first, so that others do not delay samples that are drafted for already; the
    last one within the budget may get a part. This bounds the delay of a step when a whole batch enters speculation
    at once (ReSpec, section 5.2): samples that have caught up draft now, the others in later steps.

    Args:
        missing: missing tokens of each sample, [n], not negative.
        budget: most tokens in total.
    """
    order = np.argsort(missing, kind="stable")
    before = np.cumsum(missing[order]) - missing[order]
    allotted = np.zeros_like(missing)
    allotted[order] = np.clip(budget - before, 0, missing[order])
    return allotted


class _Read(NamedTuple):
    """Number of a sample's rows, from the first, that are in its KV, and its preemptions at that time."""

    rows: int
    preemptions: int


class Eagle3:
    """EAGLE-3 head of a runner's model, with its draft loop. A `DraftModel`.

    The rows that a sample misses are read in one pass before its first draft step, from the stored features: a row
    for each token that was accepted since, or all of them if the sample was decoded without the head so far, was
    preempted, came from another engine, or if the head has changed. Draft steps after the last token read the
    head's own hidden states, and their KV is provisional: the pass before the next draft overwrites it with the
    rows of the true tokens. If samples share the block of a prefix, its last row belongs to the sample that wrote
    it last, which read a token of its next block. Only a guess depends on that.
    """

    def __init__(self, runner: Any, options: Eagle3Options) -> None:
        """Load the head; raises the errors of `Eagle3Model`."""
        self._runner = runner
        self._model = Eagle3Model(runner, options)
        self._budget = min(options.catch_up_tokens, runner.max_num_tokens)
        self._version: int | None = None
        self._read: dict[str, _Read] = {}
        runner.features = self._model.features

    @property
    def nbytes(self) -> int:
        """Memory of the head's weights, in bytes."""
        return self._model.nbytes

    def forget(self) -> None:
        """Forget which rows are in the KV, because the target's weights and all KV are about to change."""
        self._version = None
        self._read.clear()

    def drop(self) -> None:
        """Do the same as `forget`: the weights of the head sleep with the target's."""
        self.forget()

    def begin(self, version: int) -> None:
        """Record the version; the head drafts for any weights of the target."""
        self._version = version

    def build(self, seconds: float) -> bool:
        """Return True: the head needs no preparation."""
        return self._version is not None

    def swap(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights; the KV of all samples is computed again with them."""
        self._read.clear()
        self._model.swap(tensors)

    @torch.inference_mode()
    def propose(self, version: int, requests: Sequence[DraftRequest]) -> DraftResult:
        """Draft tokens by sample; none for a sample whose rows are not all in the KV yet.

        Raises:
            StaleDrafter: `version` is not the version of the target's weights.
        """
        if self._version != version:
            raise StaleDrafter(f"the head drafts for weights {self._version}, not for {version}")
        self._forget_ended()
        rows = DraftRows(self._runner, [request for request in requests if request.length > 1])
        if not len(rows):
            return DraftResult({})
        # At least the last row is read, because it predicts the next token.
        starts = np.minimum(self._rows_read(rows.requests), rows.positions - 1)
        missing = rows.positions - starts
        counts = allot(missing, self._budget)
        # Samples with one row come first, as the kernels of some backends require.
        reading = np.flatnonzero(counts)
        reading = reading[np.argsort(counts[reading], kind="stable")]
        place = np.empty(len(rows), np.int64)
        place[reading] = np.arange(len(reading))
        live = np.flatnonzero(counts == missing)
        states, first = self._catch_up(rows, reading, starts[reading], counts[reading])
        for i in reading.tolist():
            request = rows.requests[i]
            self._read[request.sample_id] = _Read(int(starts[i] + counts[i]), request.preemptions)
        # Input of the next draft step, by sample.
        hidden = torch.zeros(len(rows), states.shape[1], dtype=states.dtype, device=states.device)
        hidden[on(reading, states.device)] = states

        def forward(tokens: IntArray, live: IntArray, step: int) -> torch.Tensor:
            if step == 0:
                return self._model.logits(first[on(place[live], first.device)])
            where = on(live, hidden.device)
            starts = rows.positions[live] + step - 1
            ahead = DraftPass(self._runner, rows.places[live], starts, np.ones(len(live), np.int64))
            with ahead.context(step):
                out, state = self._model.run(on(tokens, hidden.device), ahead.positions, hidden[where])
            hidden[where] = state
            return self._model.logits(out)

        return DraftResult(rows.draft(live, forward), int(counts.sum()))

    def _rows_read(self, requests: Sequence[DraftRequest]) -> IntArray:
        """Return the number of each sample's rows in its KV, [n]; 0 once its KV is in other blocks."""
        found = []
        for request in requests:
            read = self._read.get(request.sample_id)
            found.append(read.rows if read is not None and read.preemptions == request.preemptions else 0)
        return np.array(found, np.int64)

    def _catch_up(
        self, rows: DraftRows, reading: IntArray, starts: IntArray, counts: IntArray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the missing rows; returns each sample's last state and the input of its logits, [m, hidden]."""
        places = rows.places[reading]
        read = DraftPass(self._runner, places, starts, counts)
        ends = np.cumsum(counts)
        positions = np.arange(ends[-1]) - np.repeat(ends - counts, counts) + np.repeat(starts, counts)
        tokens = rows.tokens_at(np.repeat(places, counts), positions + 1)
        hidden = self._model.combine(self._model.features.read(read.slots))
        with read.context(0):
            out, state = self._model.run(on(tokens, self._runner.device), read.positions, hidden)
        last = on(ends - 1, out.device)
        return state[last], out[last]

    def _forget_ended(self) -> None:
        known = self._runner.requests
        if len(self._read) > 2 * len(known) + 16:
            self._read = {key: read for key, read in self._read.items() if key in known}
