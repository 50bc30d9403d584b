"""The weights of a trainer's policy, as the fleet loads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.adapters import Adapter
from paceline.integrations.errors import UnsupportedTrainerError
from paceline.integrations.trl.lora import MergedWeights, check_for_fleet


def weights_of(trainer: Any) -> Mapping[str, Any]:
    """Gather the weights, a LoRA adapter merged into them; all processes take part.

    Returns tensors by the names that the model has without PEFT. They are whole in the main process; elsewhere
    some may be missing.

    Raises:
        UnsupportedTrainerError: an adapter cannot be merged, or not with weights that are spread over processes.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not is_peft(model):
        state: dict[str, Any] = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        return state
    if _is_sharded(trainer):
        raise UnsupportedTrainerError("with FSDP or DeepSpeed, adapters cannot be merged: use lora='adapter'")
    return MergedWeights(model)


def adapter_of(trainer: Any) -> tuple[Adapter, dict[str, Any]]:
    """Gather the trained LoRA adapter and the weights below it; all processes take part.

    In the main process both are whole.

    Raises:
        UnsupportedTrainerError: instances cannot merge the adapter.
    """
    from peft import get_peft_model_state_dict

    model = trainer.accelerator.unwrap_model(trainer.model)
    name = check_for_fleet(model)
    if not _is_sharded(trainer):
        # It finds adapters of tied tensors.
        MergedWeights(model)
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    # Otherwise PEFT has the weights of an output layer beside its adapter, which the fleet has already.
    tensors = get_peft_model_state_dict(
        model, state_dict=state, adapter_name=name, save_embedding_layers=False
    )
    base = {
        key.removeprefix("base_model.model.").replace(".base_layer", ""): value
        for key, value in state.items()
        if model.prefix not in key
    }
    return Adapter(tensors, model.peft_config[name].to_dict()), base


def is_peft(model: Any) -> bool:
    """Return True for a model of PEFT, without importing PEFT."""
    return any(base.__module__.partition(".")[0] == "peft" for base in type(model).__mro__)


def _is_sharded(trainer: Any) -> bool:
    return bool(trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)
