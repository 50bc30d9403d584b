"""Quantized copy of the target: the same modules, with linear layers in 4 bits.

Attention, norms, rotary embeddings, embeddings and the output head are the *same objects*, so layer names, forward
context and KV tensors are the target's, and new values in them apply to the copy at once. Containers are copied
shallowly, as deep as there are linear layers in them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from kernels.w4a16 import GROUPS
from services.generation.engine.draft_models.w4_linear import W4LinearMethod


class UnsupportedQuantization(ValueError):
    """The model cannot be quantized; the message says why."""


class QuantizedCopy:
    """Quantized copy of a model. Its weights are complete once `rebuild` has ended."""

    def __init__(self, target: nn.Module, group: int) -> None:
        """Copy the structure of a model.

        Args:
            target: the model, loaded.
            group: input columns that share a scale; must divide the inputs of every linear layer on this rank.

        Raises:
            UnsupportedQuantization: it does not, or there is no layer that is not quantised already.
        """
        if group not in GROUPS:
            raise UnsupportedQuantization(f"a group has {', '.join(map(str, GROUPS))} columns, not {group}")
        self._group = group
        self._leaves: list[tuple[LinearBase, LinearBase, W4LinearMethod]] = []
        self.model = self._copy(target, {})
        if not self._leaves:
            raise UnsupportedQuantization("the model has no linear layer of 16 or 32 bits")

    @property
    def nbytes(self) -> int:
        """Memory of the 4-bit weights, in bytes."""
        return sum(method.nbytes for _, _, method in self._leaves)

    def rebuild(self) -> Iterator[None]:
        """Quantize the target's weights; yields between slices of work."""
        for source, leaf, method in self._leaves:
            yield from method.rebuild()
            if source.bias is not None:
                # Of its own: vLLM's CPU kernels change the dtype of the target's in place.
                leaf.bias = nn.Parameter(source.bias.detach().clone(), requires_grad=False)

    def drop(self) -> None:
        """Free the memory of the weights."""
        for _, _, method in self._leaves:
            method.drop()

    def _copy(self, module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
        if id(module) in known:
            return known[id(module)]
        if isinstance(module, LinearBase):
            made: nn.Module = self._leaf(module)
        else:
            children = {
                name: child if child is None else self._copy(child, known)
                for name, child in module._modules.items()
            }
            made = module
            if any(children[name] is not child for name, child in module._modules.items()):
                made = _shallow(module)
                made._modules.update(children)
                if hasattr(made, "do_not_compile"):
                    # A compiled forward belongs to the target's modules.
                    made.do_not_compile = True
        known[id(module)] = made
        return made

    def _leaf(self, layer: LinearBase) -> LinearBase:
        """Return the 4-bit layer for one of the target's; the layer itself if it is quantised already."""
        if not isinstance(layer.quant_method, UnquantizedLinearMethod):
            return layer
        inputs = getattr(layer, "input_size_per_partition", layer.input_size)
        if inputs % self._group:
            raise UnsupportedQuantization(
                f"a group of {self._group} does not divide the {inputs} inputs of {layer.prefix}"
            )
        leaf = _shallow(layer)
        assert isinstance(leaf, LinearBase)
        method = W4LinearMethod(layer, self._group)
        leaf.quant_method = method
        leaf.register_parameter("weight", nn.Parameter(torch.empty(0), requires_grad=False))
        self._leaves.append((layer, leaf, method))
        return leaf


def _shallow(module: nn.Module) -> nn.Module:
    """Return a copy with registries of its own, of the same parameters, buffers and children."""
    made: nn.Module = object.__new__(type(module))
    made.__dict__.update(module.__dict__)
    for registry in ("_parameters", "_buffers", "_modules"):
        made.__dict__[registry] = dict(module.__dict__[registry])
    return made
