"""Weights of a trainer's policy in the form that the fleet loads, with a LoRA adapter merged or separate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.integrations import UnsupportedTrainerError
from paceline.weights.adapters import BY_FLEET, BY_TRAINER, Adapter, refused

_HALF_OR_FULL = ("torch.float32", "torch.bfloat16", "torch.float16")


def check_for_fleet(model: Any) -> str:
    """Return the name of the trained adapter, which instances must be able to merge.

    Raises:
        UnsupportedTrainerError: they cannot, or other parameters are trained, too; it names the option or layer.
    """
    from peft.tuners import lora

    adapter = _check_options(model, BY_FLEET, " or use lora='merged'")
    wrong = [
        f"{name} is a {type(layer).__name__}"
        for name, layer in _outermost(model.get_base_model())
        if type(layer) is not lora.Linear
    ]
    trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    wrong += [f"{name} is trained, too" for name in trained if model.prefix not in name]
    if wrong:
        raise UnsupportedTrainerError(
            f"instances merge adapters of linear layers alone, but {', '.join(wrong[:16])}. "
            "Leave it out, or use lora='merged'"
        )
    return adapter


def _check_options(model: Any, allowed: Mapping[str, tuple[Any, ...] | None], other_way: str = "") -> str:
    """Return the name of the trained adapter; refuse several adapters, and options that are not allowed."""
    active = list(model.active_adapters)
    if len(active) != 1:
        raise UnsupportedTrainerError(
            f"{len(active)} adapters are active, {', '.join(active)}: one can be pushed"
        )
    wrong = refused(model.peft_config[active[0]].to_dict(), allowed)
    if not wrong:
        return active[0]
    options = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
    raise UnsupportedTrainerError(
        f"the adapter's LoraConfig has {options}, which cannot be merged: leave it out{other_way}"
    )


class MergedWeights(Mapping[str, Any]):
    """Tensors under the names of the model without PEFT. They are merged in memory, one at a time."""

    def __init__(self, model: Any) -> None:
        """Check all layers of a PEFT model, without merging any.

        Raises:
            UnsupportedTrainerError: an option or a layer of the adapter cannot be merged, or gives tied tensors
                different values; it names the option.
        """
        self._adapter = _check_options(model, BY_TRAINER)
        self._tensors: dict[str, _Tensor] = {}
        found: dict[object, str] = {}
        for name, tensor in _tensors(model.get_base_model(), self._adapter):
            first = found.setdefault(tensor.place, name)
            if first == name:
                self._tensors[name] = tensor
            elif self._tensors[first].policy != tensor.policy:
                option = tensor.option or self._tensors[first].option
                raise UnsupportedTrainerError(
                    f"LoraConfig.{option} gives {first} and {name} different values, but they are tied: the fleet "
                    "has one tensor for both. Leave them out of the adapter, or set ensure_weight_tying for the "
                    "embedding"
                )

    def __getitem__(self, name: str) -> Any:
        """Return a newly merged tensor; one without an adapter is the model's own."""
        return self._tensors[name].value(self._adapter)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Tensor of the model without PEFT, and the layers of PEFT around it."""

    module: Any
    """Module of the tensor; None if PEFT does not affect it."""
    local: str
    own: Any
    """The tensor that is in the module."""
    place: object
    """Place of the tensor without PEFT; equal for tied tensors."""
    policy: object
    """For tensors of equal places: equal if their merged values are."""
    layers: tuple[Any, ...] = ()
    """Layers of PEFT that add to the tensor, the outermost first."""
    option: str = ""
    """Option of LoraConfig that added PEFT here."""

    def value(self, adapter: str) -> Any:
        if not self.layers:
            return self.own.detach()
        import torch

        parameters = dict(self.module.named_parameters(recurse=False))
        kept = {name: parameter.data for name, parameter in parameters.items()}
        merged = [list(layer.merged_adapters) for layer in self.layers]
        try:
            for parameter in parameters.values():
                parameter.data = parameter.data.clone()
            with torch.no_grad():
                for layer in self.layers:
                    layer.merge(adapter_names=[adapter])
            return parameters[self.local].data if self.local in parameters else self.own.detach()
        finally:
            for name, parameter in parameters.items():
                parameter.data = kept[name]
            for layer, before in zip(self.layers, merged, strict=True):
                layer.merged_adapters[:] = before


def _tensors(base: Any, adapter: str) -> Iterator[tuple[str, _Tensor]]:
    """Yield all tensors of a model under their names without PEFT, in the order of the model."""
    wrappers = dict(_outermost(base))
    state = base.state_dict(keep_vars=True)
    seen = set()
    for name, own in state.items():
        around = next((each for each in _prefixes(name) if each in wrappers), None)
        if around is None:
            yield name, _Tensor(None, name, own, _place(own), _place(own))
        elif around not in seen:
            seen.add(around)
            for local, tensor in _inside(around, wrappers[around], adapter):
                yield f"{around}.{local}", tensor


def _inside(name: str, wrapper: Any, adapter: str) -> Iterator[tuple[str, _Tensor]]:
    """Yield the tensors of the module inside a wrapper of PEFT."""
    option, layers, before, module = _opened(name, wrapper, adapter)
    if next(_outermost(module), None) is not None:
        raise UnsupportedTrainerError(
            f"LoraConfig.{option} covers {name}, which has adapters within: name one of both"
        )
    for layer in layers:
        _check_layer(name, option, layer, module, adapter)
    policy = tuple(_policy(layer, adapter) for layer in layers)
    originals = before.state_dict(keep_vars=True)
    for local, own in module.state_dict(keep_vars=True).items():
        place = _place(originals[local])
        yield local, _Tensor(module, local, own, place, (_place(own), policy), layers, option)


def _opened(name: str, wrapper: Any, adapter: str) -> tuple[str, tuple[Any, ...], Any, Any]:
    """Return option, layers, the module without PEFT, and the module whose tensors are trained or added to.

    Classes must match exactly, because a subclass may merge in another way.
    """
    from peft.tuners import lora
    from peft.tuners.lora.layer import ParamWrapper
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    kind = type(wrapper)
    if kind is ModulesToSaveWrapper:
        before = wrapper.original_module
        return "modules_to_save", (), before, dict(wrapper.modules_to_save.items()).get(adapter, before)
    if kind is TrainableTokensWrapper:
        before = wrapper.original_module
        return "trainable_token_indices", (wrapper.token_adapter,), before, before
    if kind is ParamWrapper:
        layers = []
        while type(wrapper) is ParamWrapper:
            layers.append(wrapper)
            wrapper = wrapper.base_layer
        return "target_parameters", tuple(layers), wrapper, wrapper
    if kind in (lora.Linear, lora.Embedding):
        return "target_modules", (wrapper,), wrapper.base_layer, wrapper.base_layer
    raise UnsupportedTrainerError(
        f"{name} is a {kind.__module__}.{kind.__name__} of PEFT, which cannot be merged: LoraConfig.target_modules "
        "may name linear and embedding layers that are not quantized"
    )


def _check_layer(name: str, option: str, layer: Any, module: Any, adapter: str) -> None:
    wrong = [
        f"{local} in {parameter.dtype}"
        for local, parameter in module.named_parameters(recurse=False)
        if str(parameter.dtype) not in _HALF_OR_FULL
    ]
    if wrong:
        raise UnsupportedTrainerError(
            f"LoraConfig.{option} covers {name}, which has {', '.join(wrong)}: load the model without quantization"
        )
    if getattr(layer, "lora_bias", {}).get(adapter) and getattr(module, "bias", None) is None:
        raise UnsupportedTrainerError(
            f"LoraConfig.lora_bias gives {name} a bias, which the fleet's model has not"
        )


def _policy(layer: Any, adapter: str) -> object:
    """Return a value that is equal for layers of PEFT that add the same, because PEFT may tie adapters, too."""
    places = set()
    for name in layer.adapter_layer_names:
        held = dict(getattr(layer, name, {}).items()).get(adapter)
        if held is not None:
            # Tied adapters may be transposed: they share the memory, not the shape.
            tensors = held.parameters() if hasattr(held, "parameters") else [held]
            places |= {each.untyped_storage().data_ptr() for each in tensors}
    return frozenset(places), getattr(layer, "scaling", {}).get(adapter)


def _place(tensor: Any) -> object:
    """Return a value that is equal for tensors in the same memory, and unique for a tensor without memory."""
    return (tensor.data_ptr(), tuple(tensor.shape)) if tensor.data_ptr() else id(tensor)


def _outermost(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules of PEFT within a module, with their names, but no module of PEFT inside another one."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    last = None
    for name, each in module.named_modules(remove_duplicate=False):
        if last is not None and name.startswith(f"{last}."):
            continue
        if isinstance(each, BaseTunerLayer | AuxiliaryTrainingWrapper):
            last = name
            yield name, each


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


def weights_of(trainer: Any) -> Mapping[str, Any]:
    """Gather the weights, with a LoRA adapter merged into them; all processes take part.

    Returns tensors under the names of the model without PEFT: all of them in the main process, possibly fewer in
    others.

    Raises:
        UnsupportedTrainerError: an adapter cannot be merged, or the weights are sharded over processes.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not is_peft(model):
        state: dict[str, Any] = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        return state
    if _is_sharded(trainer):
        raise UnsupportedTrainerError("with FSDP or DeepSpeed, adapters cannot be merged: use lora='adapter'")
    return MergedWeights(model)


def adapter_of(trainer: Any) -> tuple[Adapter, dict[str, Any]]:
    """Gather the trained LoRA adapter and the base weights; all processes take part.

    Both are complete in the main process.

    Raises:
        UnsupportedTrainerError: instances cannot merge the adapter.
    """
    from peft import get_peft_model_state_dict

    model = trainer.accelerator.unwrap_model(trainer.model)
    name = check_for_fleet(model)
    if not _is_sharded(trainer):
        # Only for its check of tied tensors.
        MergedWeights(model)
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    # Without `save_embedding_layers=False` PEFT adds the weights of an output layer, which the fleet has already.
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
    """Return True for a model of PEFT; does not import PEFT."""
    return any(base.__module__.partition(".")[0] == "peft" for base in type(model).__mro__)


def _is_sharded(trainer: Any) -> bool:
    return bool(trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)
