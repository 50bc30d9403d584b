"""Linear layer in 4 bits: rounded to nearest by groups, multiplied by the fastest kernel that fits.

16-bit activations go through vLLM's own mixed-precision kernels (CPUWNA16 on CPU, Machete or Marlin on CUDA). All
else on a CPU goes through torch's kernel, and what neither takes through `kernels.w4a16.matmul`, which unpacks the
weight at every call.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import torch
from vllm.model_executor.kernels.linear import choose_mp_linear_kernel
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.parameter import GroupQuantScaleParameter, PackedvLLMParameter
from vllm.scalar_type import scalar_types

from kernels.w4a16 import CpuW4Weight, W4Weight, cpu_product, for_cpu, matmul, matmul_cpu, quantise

Weight = W4Weight | CpuW4Weight
# Multiplications that one slice of reading a weight may take: some milliseconds on a core.
_SLICE_MULTIPLICATIONS = 1 << 27
_PACKED, _SCALES, _ZEROS = "weight_packed", "weight_scale", "weight_zero_point"


class W4LinearMethod(LinearMethodBase):
    """The `quant_method` of a layer of the quantized copy: holds the 4-bit weight of `source`, the target's layer.

    A rebuild writes into the tensors of the first one, so that memory does not grow after it was measured.
    """

    def __init__(self, source: LinearBase, group: int) -> None:
        self._source = source
        self._group = group
        self._dtype: torch.dtype = source.params_dtype
        self._kernel_type = _kernel_type(_shape(source), group, self._dtype)
        self._kernel: Any = None
        # Tensors of vLLM's kernel, of torch's, or our own.
        self._held: torch.nn.Module | None = None
        self._weight: Weight | None = None
        self._on_cpu = (
            self._kernel_type is None
            and source.weight.device.type == "cpu"
            and cpu_product.fits(*_shape(source), group)
        )

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the weights come from the target, not from a checkpoint."""

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply x [M, K] by the transposed 4-bit weight, and add the bias."""
        if self._kernel is not None:
            result: torch.Tensor = self._kernel.apply_weights(self._held, x, None)
        elif isinstance(self._weight, CpuW4Weight):
            result = matmul_cpu(x.contiguous(), self._weight)
        else:
            assert self._weight is not None
            result = matmul(x.contiguous(), self._weight)
        return result if bias is None else result.add_(bias.to(result.dtype))

    def rebuild(self) -> Iterator[None]:
        """Read the target's weight and quantize it; yields between slices of work."""
        weight = yield from _read(self._source, self._dtype)
        scale_dtype = cpu_product.SCALES if self._on_cpu else self._dtype
        rounded = quantise(weight, self._group, scale_dtype=scale_dtype)
        if self._kernel_type is None:
            self._weight = _into(self._weight, for_cpu(rounded) if self._on_cpu else rounded)
        else:
            self._pack(rounded)
        yield

    def drop(self) -> None:
        """Free the memory."""
        self._kernel = self._held = self._weight = None

    @property
    def nbytes(self) -> int:
        """Memory of the 4-bit weight, in bytes; 0 before it is built."""
        if self._weight is not None:
            return self._weight.nbytes
        held = () if self._held is None else self._held.parameters()
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def _pack(self, rounded: W4Weight) -> None:
        """Store the weight in the layout of the kernel."""
        rows, columns = _shape(self._source)
        assert self._kernel_type is not None
        fresh = torch.nn.Module()
        fresh.register_parameter("bias", None)
        fresh.register_parameter(
            _PACKED,
            PackedvLLMParameter(
                data=rounded.packed,
                input_dim=1,
                output_dim=0,
                packed_dim=1,
                packed_factor=8,
                weight_loader=_no_loader,
            ),
        )
        fresh.register_parameter(
            _SCALES,
            GroupQuantScaleParameter(
                data=rounded.scales, input_dim=1, output_dim=0, weight_loader=_no_loader
            ),
        )
        config = _config((rows, columns), self._group, self._dtype)
        kernel = self._kernel_type(config, _PACKED, _SCALES, _ZEROS)
        kernel.process_weights_after_loading(fresh)
        if self._held is None:
            self._held, self._kernel = fresh, kernel
            return
        for name, tensor in fresh.named_parameters():
            self._held.get_parameter(name).data.copy_(tensor.data)


def _shape(layer: LinearBase) -> tuple[int, int]:
    """Return (outputs, inputs) of a layer on this rank."""
    rows = getattr(layer, "output_size_per_partition", layer.output_size)
    return rows, getattr(layer, "input_size_per_partition", layer.input_size)


def _config(shape: tuple[int, int], group: int, dtype: torch.dtype) -> MPLinearLayerConfig:
    turned = (shape[1], shape[0])
    return MPLinearLayerConfig(turned, turned, scalar_types.uint4b8, dtype, group, False)


def _kernel_type(shape: tuple[int, int], group: int, dtype: torch.dtype) -> type | None:
    """Return vLLM's fastest kernel for a 4-bit weight of this shape; None if it has none."""
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    try:
        chosen: type = choose_mp_linear_kernel(_config(shape, group, dtype))
    except ValueError:
        return None
    # vLLM chooses this kernel on every CPU, but its builds for AVX2 do not contain it.
    if chosen is CPUWNA16LinearKernel and not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        return None
    return chosen


def _read(layer: LinearBase, dtype: torch.dtype) -> Generator[None, None, torch.Tensor]:
    """Return the weight of a layer, [N, K], as it multiplies with it.

    vLLM's CPU layers keep only what their kernel packed, of which the layer itself is asked: its product with unit
    vectors is the weight, exactly, because each sum has one term that is not 0.
    """
    if layer.weight.numel():
        return layer.weight.detach().to(dtype).contiguous()
    rows, columns = _shape(layer)
    at_once = max(1, min(columns, _SLICE_MULTIPLICATIONS // (rows * columns)))
    parts = []
    for begin in range(0, columns, at_once):
        units = torch.zeros(min(at_once, columns - begin), columns, dtype=dtype)
        units[:, begin:].fill_diagonal_(1)
        parts.append(layer.quant_method.apply(layer, units, None).t())
        yield
    return torch.cat(parts, dim=1).contiguous()


def _into(held: Weight | None, fresh: Weight) -> Weight:
    """Copy a weight into the tensors of the previous one, if there is one."""
    if held is None:
        return fresh
    assert type(held) is type(fresh), "a layer's kernel stays the same"
    held.packed.copy_(fresh.packed)
    held.scales.copy_(fresh.scales)
    return held


def _no_loader(*_: Any) -> None:
    """Do nothing: these parameters are created complete."""
