"""TRL's AsyncGRPOTrainer without a GPU: its own but for two functions that need one, see `without_gpu`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline import Client, OpenBatch, Sample
from paceline.integrations.trl import PacelineWeightTransfer


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Let each segment attend to its path, as FlashAttention 3 does for TRL: causal, aligned at the ends.

    `query` is [1, heads, tokens, width], `key` and `value` have fewer heads; returns [1, tokens, heads, width].
    """
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    found = []
    starts, ends = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    for nth in range(len(starts) - 1):
        own = query[:, :, starts[nth] : starts[nth + 1]]
        path = tree_kv_index[ends[nth] : ends[nth + 1]]
        scores = own @ key[:, :, path].transpose(-1, -2) * scaling
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(len(path) - own.shape[2])
        found.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value[:, :, path])
    return torch.cat(found, 2).transpose(1, 2), None


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the place of FlashAttention 3, and of the look-up of the GPU's peak performance for the logs."""
    packing = import_module("trl.experimental.async_grpo.packing")
    monkeypatch.setattr(packing, "tree_attention", attend)
    trainer = import_module("trl.experimental.async_grpo.async_grpo_trainer")
    monkeypatch.setattr(trainer, "get_peak_flops_per_device", lambda *_: None)


class RecordedWeights(PacelineWeightTransfer):
    """A weight transfer that keeps the weights of each version in a folder."""

    def __init__(self, run: Any, client: Client, model: Path, folder: Path) -> None:
        super().__init__(run)
        self._client, self._model, self._folder = client, model, folder
        self.folders: dict[int, Path] = {}
        """By policy version, in the order of the pushes."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        tensors = {name: tensor.clone() for name, tensor in iterator}
        super().send_weights(iter(tensors.items()))
        folder = self._folder / f"push-{self.pushes}"
        folder.mkdir()
        shutil.copy(self._model / "config.json", folder)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        self.folders[self._client.versions().policy_version] = folder


def samples_read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Sample]]:
    """The step and the sample of all that open batches give."""
    read: list[tuple[int, Sample]] = []
    iterate = OpenBatch.__iter__

    def recorded(self: OpenBatch) -> Iterator[Sample]:
        for sample in iterate(self):
            read.append((self.batch.step, sample))
            yield sample

    monkeypatch.setattr(OpenBatch, "__iter__", recorded)
    return read
