"""Target model: the policy as the drafter's teacher, with its layer features and next-token distributions.

    policy = TargetModel(path, version, settings)
    seen = policy.read(tokens, layers)          # [B, L] -> features and embeddings, without gradient
    logits = policy.logits(seen.output[rows])   # [n, V]

The features are what vLLM passes to an EAGLE-3 head: the residual stream after the blocks `layers`, which are
transformers' hidden_states. Rows are padded on the right; causal attention never attends to the padding, so no mask
is needed. `start_from_policy` and `choose_vocabulary` initialise a fresh head from the policy.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.files import open_regular
from services.drafter.learning.data import LearningSettings, TrainingSample, default_layers
from services.drafter.learning.head import Eagle3Head, HeadShape

_HEAD = "lm_head.weight"
_CHECKED_TOKENS = 8
_SPREAD = 0.02
"""Standard deviation of fresh weights at a hidden size of 2048; it falls with the root of the size."""
_ROWS = 0.5
"""Scale of the policy's output rows with which the head begins.

Not 1: vLLM shares the policy's output layer with a head of equal rows, and would load the head's later weights
into it.
"""


class PolicyMismatch(ValueError):
    """Weights or a model that cannot be the teacher; the message has the reason. Nothing has changed."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Features [B, L, layers * h], embeddings and last outputs [B, L, h] of tokens [B, L]."""

    features: Tensor
    embeddings: Tensor
    output: Tensor


class TargetModel:
    """Weights of one policy version, on `device`, in the dtype of the checkpoint (float32 on CPU)."""

    def __init__(self, path: Path, version: int, settings: LearningSettings) -> None:
        """Load a model folder. PolicyMismatch: it cannot be loaded, or no head can draft for it."""
        self.device = torch.device(settings.device)
        dtype: Any = torch.float32 if self.device.type == "cpu" else "auto"
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise PolicyMismatch(f"{path} is no model that can be loaded: {error}") from error
        self.model: nn.Module = model.to(self.device).eval().requires_grad_(False)
        self.version = version
        config = model.config.get_text_config()
        self.vocabulary: int = config.vocab_size
        self.depth: int = config.num_hidden_layers
        self._check_output()

    def head_shape(self, settings: LearningSettings) -> HeadShape:
        """Return the shape of a head for this policy. PolicyMismatch: it lacks the layers of `settings`."""
        config = self.model.config.get_text_config()
        heads = config.num_attention_heads
        layers = tuple(settings.layers or default_layers(self.depth))
        if not self.has_layers(layers):
            raise PolicyMismatch(f"layers {list(layers)}: expected ascending numbers in 1..{self.depth - 1}")
        rope = getattr(config, "rope_parameters", None) or {}
        return HeadShape(
            vocab_size=self.vocabulary,
            draft_vocab_size=min(settings.draft_vocabulary, self.vocabulary),
            hidden_size=config.hidden_size,
            intermediate_size=settings.intermediate_size or config.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            layers=layers,
            eps=getattr(config, "rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta", 10000.0)),
            max_positions=config.max_position_embeddings,
        )

    def has_layers(self, layers: Sequence[int]) -> bool:
        """Return True if the outputs of these layers can be features."""
        rising = list(layers) == sorted(set(layers)) and len(layers) > 0
        return rising and layers[0] >= 1 and layers[-1] < self.depth

    def load(self, path: Path, version: int) -> None:
        """Load the weights of a folder, in place.

        Raises:
            PolicyMismatch: files missing or corrupt, or tensors of other names or shapes, or not finite; all is as
                before.
        """
        tensors = _read(path)
        own = dict(self.model.state_dict())
        if self._tied and _HEAD not in tensors:
            own.pop(_HEAD, None)
        if own.keys() != tensors.keys():
            missing, foreign = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
            raise PolicyMismatch(f"{path}: missing {missing[:8]}, not of this policy {foreign[:8]}")
        for name, tensor in tensors.items():
            if tensor.shape != own[name].shape:
                raise PolicyMismatch(
                    f"{path}: {name} has shape {list(tensor.shape)}, expected {list(own[name].shape)}"
                )
            if not bool(tensor.isfinite().all()):
                raise PolicyMismatch(f"{path}: {name} has values that are NaN or infinite")
        with torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(tensor)
        self.version = version

    @torch.no_grad()
    def read(self, tokens: Tensor, layers: Sequence[int]) -> Seen:
        """Run the policy on tokens [B, L] and collect the features of `layers`."""
        base = self.model.get_decoder()
        found = base(input_ids=tokens, use_cache=False, output_hidden_states=True)
        features = torch.cat(
            [found.last_hidden_state[..., :0]] + [found.hidden_states[layer] for layer in layers], -1
        )
        return Seen(features, self.model.get_input_embeddings()(tokens), found.last_hidden_state)

    @torch.no_grad()
    def logits(self, output: Tensor) -> Tensor:
        """Return the logits [n, V] of the next token from last outputs [n, h]."""
        return self.output_layer(output)

    @property
    def output_layer(self) -> nn.Module:
        """The linear layer from last outputs to logits."""
        return self.model.get_output_embeddings()  # type: ignore[no-any-return]

    @property
    def _tied(self) -> bool:
        return bool(self.model.config.get_text_config().tie_word_embeddings)

    def _check_output(self) -> None:
        """Check that logits are the output layer of the last output and nothing else, as `logits` assumes."""
        probe = torch.arange(min(_CHECKED_TOKENS, self.vocabulary), device=self.device).unsqueeze(0)
        try:
            with torch.no_grad():
                wanted = self.model(input_ids=probe, use_cache=False).logits.float()
            found = self.logits(self.read(probe, ()).output).float()
        except (AttributeError, TypeError) as error:
            name = type(self.model).__name__
            raise PolicyMismatch(f"{name} lacks the structure that a drafter needs: {error}") from error
        if not torch.allclose(found, wanted, rtol=1e-2, atol=1e-2):
            name = type(self.model).__name__
            raise PolicyMismatch(
                f"{name} changes its logits after the output layer, which the learner does not support"
            )


def _read(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder, from one file or from shards."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise PolicyMismatch(f"{path} holds no *.safetensors file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            # Refused here: opening a FIFO, for example, would block permanently.
            os.close(open_regular(file))
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise PolicyMismatch(f"{file} is truncated or corrupt: {error}") from error
    return tensors


@torch.no_grad()
def start_from_policy(head: Eagle3Head, policy: TargetModel, generator: torch.Generator) -> None:
    """Initialise a head in place: it passes on the highest layer's feature to the policy's scaled output rows.

    The head's own layer starts with a small output.
    """
    hidden = head.shape.hidden_size
    spread = _SPREAD * (2048 / hidden) ** 0.5
    for parameter in head.parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            drawn = torch.empty(parameter.shape).normal_(0.0, spread, generator=generator)
            parameter.copy_(drawn)
    for silent in (head.midlayer.self_attn.o_proj, head.midlayer.mlp.down_proj):
        silent.weight.mul_(0.1)
    head.fc.weight[:, -hidden:] += torch.eye(hidden, device=head.fc.weight.device)
    output = policy.output_layer
    assert isinstance(output, nn.Linear), "the policy was checked to have one"
    rows = output.weight if head.tokens is None else output.weight[head.tokens]
    head.lm_head.weight.copy_(_ROWS * rows.float())


def choose_vocabulary(rollouts: Sequence[TrainingSample], vocabulary: int, size: int) -> list[int]:
    """Return `size` of `vocabulary` token ids, ascending: the most frequent ones of the responses.

    If there are too few, the most frequent ones of the prompts follow, then the lowest ids. Ties go to the
    lower id.
    """
    if size >= vocabulary:
        return list(range(vocabulary))
    responses = Counter(token for rollout in rollouts for token in rollout.response)
    prompts = Counter(token for rollout in rollouts for token in rollout.prompt)
    order = sorted(
        (responses.keys() | prompts.keys()), key=lambda token: (-responses[token], -prompts[token], token)
    )
    chosen = dict.fromkeys(order[:size])
    for token in range(vocabulary):
        if len(chosen) >= size:
            break
        chosen.setdefault(token)
    return sorted(chosen)
