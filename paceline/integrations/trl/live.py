"""Log-probabilities of a trainer's live model."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any


def log_probabilities(
    trainer: Any, prompt: Sequence[int], responses: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return natural logarithms of the probabilities of responses of equal length, [samples][tokens].

    One forward at temperature 1, without dropout and gradients. All processes call it with the same tokens: where
    the weights are spread over them, each layer is gathered as in training.
    """
    import torch

    model, accelerator = trainer.model, trainer.accelerator
    length = len(responses[0])
    ids = torch.tensor([[*prompt, *response] for response in responses], device=accelerator.device)
    options: dict[str, Any] = {"use_cache": False}
    bare = accelerator.unwrap_model(model)
    bare = bare.get_base_model() if hasattr(bare, "get_base_model") else bare
    if "logits_to_keep" in inspect.signature(bare.forward).parameters:
        # Those of a long prompt would take more memory than all else.
        options["logits_to_keep"] = length + 1
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), accelerator.autocast():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **options).logits
    finally:
        model.train(training)
    chosen = ids[:, -length:, None]
    logprobs = logits[:, -length - 1 : -1].float().log_softmax(dim=-1).gather(-1, chosen)
    found: list[list[float]] = logprobs[..., 0].tolist()
    return found
