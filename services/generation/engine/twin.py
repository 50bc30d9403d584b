"""A structural twin of the target: the same modules, but for linear layers in 4 bits.

Attention, norms, rotary embeddings, embeddings and the output head are the *same objects*, so layer names, forward
context and KV tensors are the target's, and new values in them are the twin's at once. Containers are copied
shallowly, as deep as there are linear layers in them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from kernels.w4a16 import GROUPS
from services.generation.engine.w4_linear import W4LinearMethod


class UnsupportedTwin(ValueError):
    """The model cannot have a 4-bit twin; the text says why."""


class Twin:
    """The twin of a model. Its weights are there once `rebuild` has come to its end."""

    def __init__(self, target: nn.Module, group: int) -> None:
        """Args:
            target: the model, loaded.
            group: input columns that share a scale; must divide the inputs of every linear layer on this rank.

        Raises:
            UnsupportedTwin: it does not, or there is no layer that is not quantised already.
        """
        if group not in GROUPS:
            raise UnsupportedTwin(f"a group has {', '.join(map(str, GROUPS))} columns, not {group}")
        self._group = group
        self._leaves: list[tuple[LinearBase, LinearBase, W4LinearMethod]] = []
        self.model = self._copy(target, {})
        if not self._leaves:
            raise UnsupportedTwin("the model has no linear layer of 16 or 32 bits")

    @property
    def nbytes(self) -> int:
        """Memory that the twin has for itself, in bytes."""
        return sum(method.nbytes for _, _, method in self._leaves)

    def rebuild(self) -> Iterator[None]:
        """Round the target's weights anew; yields between slices of work, and is done when it ends."""
        for source, leaf, method in self._leaves:
            yield from method.rebuild()
            if source.bias is not None:
                # Of its own: vLLM's CPU kernels change the dtype of the target's in place.
                leaf.bias = nn.Parameter(source.bias.detach().clone(), requires_grad=False)

    def drop(self) -> None:
        """Give the memory of the weights back."""
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
        """The 4-bit layer in place of one of the target's; itself where that is quantised already."""
        if not isinstance(layer.quant_method, UnquantizedLinearMethod):
            return layer
        inputs = getattr(layer, "input_size_per_partition", layer.input_size)
        if inputs % self._group:
            raise UnsupportedTwin(
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
    """A copy with registries of its own, of the same parameters, buffers and children."""
    made: nn.Module = object.__new__(type(module))
    made.__dict__.update(module.__dict__)
    for registry in ("_parameters", "_buffers", "_modules"):
        made.__dict__[registry] = dict(module.__dict__[registry])
    return made
