"""The weights of a trainer's policy, as the fleet loads them."""

from __future__ import annotations

from typing import Any

from paceline.adapters import Adapter
from paceline.integrations.errors import UnsupportedTrainerError

_SAVED_MODULE = "modules_to_save.default."


def weights_of(trainer: Any) -> dict[str, Any]:
    """Gather the weights, a LoRA adapter merged into them; all processes take part.

    Returns tensors by the names that the model has without PEFT. They are whole in the main process; elsewhere
    some may be missing.

    Raises:
        UnsupportedTrainerError: an adapter is to be merged with weights that are spread over processes.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not is_peft(model):
        state: dict[str, Any] = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        return state
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise UnsupportedTrainerError("with FSDP or DeepSpeed, adapters cannot be merged: use lora='adapter'")
    return _merged(model)


def adapter_of(trainer: Any) -> tuple[Adapter, dict[str, Any]]:
    """Gather the trained LoRA adapter and the weights below it; all processes take part.

    In the main process both are whole.
    """
    from peft import get_peft_model_state_dict

    model = trainer.accelerator.unwrap_model(trainer.model)
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    tensors = get_peft_model_state_dict(model, state_dict=state, adapter_name="default")
    base = {_own_name(name): value for name, value in state.items() if _is_own(model, name)}
    return Adapter(tensors, model.peft_config["default"].to_dict()), base


def is_peft(model: Any) -> bool:
    """Return True for a model of PEFT, without importing PEFT."""
    return any(base.__module__.partition(".")[0] == "peft" for base in type(model).__mro__)


def _is_own(model: Any, name: str) -> bool:
    """Return True for a tensor that the model has without PEFT, or with its saved modules put in place."""
    return model.prefix not in name and "original_module" not in name


def _own_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer", "").replace(_SAVED_MODULE, "")


def _merged(model: Any) -> dict[str, Any]:
    """Merge the adapter, copy the weights, and put back the base to the bit, which unmerging would not."""
    base = {name: p.detach().clone() for name, p in model.named_parameters() if ".base_layer." in name}
    model.merge_adapter()
    try:
        merged = {}
        for name, parameter in model.named_parameters():
            if _is_own(model, name):
                value = parameter.detach()
                merged[_own_name(name)] = value.clone() if name in base else value
    finally:
        model.unmerge_adapter()
        for name, parameter in model.named_parameters():
            if name in base:
                parameter.data.copy_(base[name])
    return merged
