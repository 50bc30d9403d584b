"""The policy as the drafter's teacher: features of its layers, and the distribution of the next token.

    policy = Policy(path, version, settings)
    seen = policy.read(tokens, layers)          # [B, L] -> features and embeddings, without gradient
    logits = policy.logits(seen.output[rows])   # [n, V]

Features are what vLLM hands its EAGLE-3 head: the residual stream behind the blocks that `layers` names, which is
transformers' hidden_states. Rows are padded on the right, where causal attention never looks back at: no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from services.drafter.learning.head import HeadShape
from services.drafter.learning.settings import LearningSettings, default_layers

_HEAD = "lm_head.weight"
_CHECKED_TOKENS = 8


class PolicyMismatch(ValueError):
    """Weights, or a model, that cannot be the teacher: the message says why. Nothing has changed."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Of tokens [B, L]: features [B, L, layers * h], their embeddings and the policy's last output, [B, L, h]."""

    features: Tensor
    embeddings: Tensor
    output: Tensor


class Policy:
    """Holds the weights of one policy version, on `device`, in the dtype of its checkpoint (CPU: float32)."""

    def __init__(self, path: Path, version: int, settings: LearningSettings) -> None:
        """PolicyMismatch: no model folder, or a model that the head cannot follow."""
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
        """Of a head for this policy. PolicyMismatch: it has not the layers that are asked for."""
        config = self.model.config.get_text_config()
        heads = config.num_attention_heads
        layers = settings.layers or default_layers(self.depth)
        if not self.has_layers(layers):
            raise PolicyMismatch(f"layers {list(layers)}: expected rising numbers in 1..{self.depth - 1}")
        rope = getattr(config, "rope_parameters", None) or {}
        return HeadShape(
            hidden=config.hidden_size,
            intermediate=settings.intermediate_size or config.intermediate_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocabulary=self.vocabulary,
            draft_vocabulary=min(settings.draft_vocabulary, self.vocabulary),
            layers=layers,
            eps=getattr(config, "rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta", 10000.0)),
            max_positions=config.max_position_embeddings,
        )

    def has_layers(self, layers: Sequence[int]) -> bool:
        """Whether the outputs of these layers can be features."""
        rising = list(layers) == sorted(set(layers)) and len(layers) > 0
        return rising and layers[0] >= 1 and layers[-1] < self.depth

    def load(self, path: Path, version: int) -> None:
        """Take over the weights of a folder, in place.

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
        """What the policy makes of tokens [B, L], with the features of `layers`."""
        base = self.model.get_decoder()
        found = base(input_ids=tokens, use_cache=False, output_hidden_states=True)
        features = torch.cat(
            [found.last_hidden_state[..., :0]] + [found.hidden_states[layer] for layer in layers], -1
        )
        return Seen(features, self.model.get_input_embeddings()(tokens), found.last_hidden_state)

    @torch.no_grad()
    def logits(self, output: Tensor) -> Tensor:
        """Of the next token, [n, V], from the last outputs [n, h]."""
        return self.output_layer(output)

    @property
    def output_layer(self) -> nn.Module:
        """The linear layer that makes logits of the last output."""
        return self.model.get_output_embeddings()  # type: ignore[no-any-return]

    @property
    def _tied(self) -> bool:
        return bool(self.model.config.get_text_config().tie_word_embeddings)

    def _check_output(self) -> None:
        """Whether the logits are the output layer of the last output and nothing else, as `logits` has it."""
        probe = torch.arange(min(_CHECKED_TOKENS, self.vocabulary), device=self.device).unsqueeze(0)
        try:
            with torch.no_grad():
                wanted = self.model(input_ids=probe, use_cache=False).logits.float()
            found = self.logits(self.read(probe, ()).output).float()
        except (AttributeError, TypeError) as error:
            name = type(self.model).__name__
            raise PolicyMismatch(
                f"{name} is not built like the models that a head can follow: {error}"
            ) from error
        if not torch.allclose(found, wanted, rtol=1e-2, atol=1e-2):
            name = type(self.model).__name__
            raise PolicyMismatch(f"{name} does something to its logits that the learner does not know")


def _read(path: Path) -> dict[str, Tensor]:
    """All tensors of a folder, from one file or from shards."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise PolicyMismatch(f"{path} holds no *.safetensors file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise PolicyMismatch(f"{file} is truncated or corrupt: {error}") from error
    return tensors
