"""Formats and products that the engine's copy does not have, put into the layers of its copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernels.w4a16 import dequantise, matmul, quantise
from services.generation.engine.types import QUANTIZED

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rounding to nearest: bits, input columns that share a scale, and whether 0 is the middle of the range."""

    bits: int
    group: int
    symmetric: bool

    @property
    def name(self) -> str:
        """Return the name in tables."""
        scheme = "symmetric" if self.symmetric else "asymmetric"
        return f"W{self.bits} {scheme}, groups of {self.group}"

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """Return what the rounded weight [N, K] stands for, in float32."""
        if self.bits == 4:
            return dequantise(quantise(weight, self.group, symmetric=self.symmetric), torch.float32)
        return _rounded(weight, self.bits, self.group, self.symmetric)

    def product(self, weight: torch.Tensor) -> Product:
        """Return the product with the rounded weight, in float32: for what is accepted, not for its time."""
        found = self.rounded(weight)
        return lambda x: torch.nn.functional.linear(x, found)


ROUNDINGS = tuple(
    Rounding(bits, group, symmetric)
    for bits, group in ((4, 128), (4, 32), (8, 128))
    for symmetric in (True, False)
)
OWN, UNPACKED, INT8 = "W4, torch's kernel", "W4, unpacked at every call", "W8A8, oneDNN"
KERNELS = (OWN, UNPACKED, INT8)
"""Products of the copy on this machine: the engine's own, the one that it had before, and 8 bits on both sides."""
_GROUP = 128


def _rounded(weight: torch.Tensor, bits: int, group: int, symmetric: bool) -> torch.Tensor:
    """Round as kernels.w4a16 does, with other bits; `group` divides the columns."""
    levels = 2**bits - 1
    grouped = weight.float().view(len(weight), -1, group)
    if symmetric:
        scale = grouped.abs().amax(-1, keepdim=True) / (levels / 2)
        zero = torch.full_like(scale, (levels + 1) / 2)
    else:
        low, high = grouped.amin(-1, keepdim=True).clamp(max=0), grouped.amax(-1, keepdim=True).clamp(min=0)
        scale = (high - low) / levels
        zero = (-low / scale.clamp(min=1e-30)).round()
    scale = scale.clamp(min=1e-30)
    integers = ((grouped / scale).round() + zero).clamp(0, levels)
    return ((integers - zero) * scale).view_as(weight)


def unpacked(weight: torch.Tensor) -> Product:
    """Return the product that unpacks the 4-bit weight for each call."""
    packed = quantise(weight, _GROUP)
    return lambda x: matmul(x.contiguous(), packed)


def int8(weight: torch.Tensor) -> Product:
    """Return oneDNN's product in 8 bits: a scale for each output, and one for the activations of a call.

    On processors without VNNI oneDNN adds pairs of products in 16 bits, which saturate: 4 % off for random data.
    """
    torch.backends.quantized.engine = "onednn"
    scales = (weight.abs().amax(1) / 127).clamp(min=1e-30)
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    packed = torch.ops.quantized.linear_prepack(
        torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8), None
    )

    def product(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.quantized.linear_dynamic(x.contiguous(), packed)
        return found

    return product


def put(engine: Any, make: Callable[[torch.Tensor], Product] | None) -> None:
    """Let the copy multiply by products that `make` makes of its weights; None: by the engine's own again."""
    engine._core.collective_rpc(_put, args=(make,))


@torch.inference_mode()
def _put(worker: Any, make: Callable[[torch.Tensor], Product] | None) -> None:
    for source, leaf, method in worker.drafters[QUANTIZED]._copy._leaves:
        leaf.quant_method = method if make is None else _Replaced(make(weight_of(source)))


def weight_of(layer: Any) -> torch.Tensor:
    """Return the weight [N, K] of one of vLLM's linear layers, which may hold it packed."""
    columns = getattr(layer, "input_size_per_partition", layer.input_size)
    units = torch.eye(columns, dtype=layer.params_dtype)
    found: torch.Tensor = layer.quant_method.apply(layer, units, None).t().contiguous()
    return found


@dataclass(frozen=True, slots=True)
class _Replaced:
    product: Product

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        found = self.product(x)
        return found if bias is None else found + bias
