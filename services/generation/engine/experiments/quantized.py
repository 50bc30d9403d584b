"""Quantized self-draft: the target's current weights in 4 bits, on the target's KV cache (EfficientRollout 4.1).

It draws with the sample's own noise from the same penalised and masked distribution as the target, so its token
equals the target's wherever the two distributions are close.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.model_executor.kernels.linear import choose_mp_linear_kernel
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.parameter import GroupQuantScaleParameter, PackedvLLMParameter
from vllm.scalar_type import scalar_types

from kernels.w4a16 import GROUPS, CpuW4Weight, W4Weight, for_cpu, linear, matmul, matmul_cpu, quantise
from services.generation.engine.draft_models.draft_loop import DraftPass, DraftRows, on
from services.generation.engine.draft_models.interface import FixedDrafter, StaleDrafter
from services.generation.engine.sampling.rows import IntArray
from services.generation.engine.types import DraftRequest, DraftResult, W4Options

Weight = W4Weight | CpuW4Weight
# Multiplications that one slice of reading a weight may take: some milliseconds on a core.
_SLICE_MULTIPLICATIONS = 1 << 27
_PACKED, _SCALES, _ZEROS = "weight_packed", "weight_scale", "weight_zero_point"


class W4LinearMethod(LinearMethodBase):
    """The `quant_method` of a layer of the quantized copy: holds the 4-bit weight of `source`, the target's layer.

    The weight is rounded to nearest by groups, and multiplied by the fastest kernel that fits. 16-bit activations
    use vLLM's own mixed-precision kernels (CPUWNA16 on CPU, Machete or Marlin on CUDA). Everything else on a CPU
    uses torch's kernel, and what neither supports `kernels.w4a16.weight`, which unpacks the weight at every call.

    A rebuild writes into the tensors of the first build, so that memory does not grow after it was measured.
    """

    def __init__(self, source: LinearBase, group: int) -> None:
        self._source = source
        self._group = group
        self._dtype: torch.dtype = source.params_dtype
        self._kernel_type = _kernel_type(_shape(source), group, self._dtype)
        self._kernel: Any = None
        # The tensors of vLLM's kernel, or the weight of torch's or our own.
        self._held: torch.nn.Module | None = None
        self._weight: Weight | None = None
        self._on_cpu = (
            self._kernel_type is None
            and source.weight.device.type == "cpu"
            and linear.fits(*_shape(source), group)
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
        scale_dtype = linear.SCALES if self._on_cpu else self._dtype
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
    """Return the weight of a layer, [N, K], as the layer uses it.

    vLLM's CPU layers keep only the packed weight of their kernel. The layer's product with unit vectors gives the
    weight back, exactly, because each sum has only one term that is not 0.
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


class UnsupportedQuantization(ValueError):
    """The model cannot be quantized; the message says why."""


class QuantizedCopy:
    """Quantized copy of a model. Its weights are complete once `rebuild` has ended.

    The copy has the target's modules, with linear layers in 4 bits. Attention, norms, rotary embeddings, embeddings
    and the output head are the *same objects*, so layer names, forward context and KV tensors are the target's, and
    new values in them apply to the copy at once. Containers that have linear layers in them are copied shallowly.
    """

    def __init__(self, target: nn.Module, group: int) -> None:
        """Copy the structure of a model.

        Args:
            target: the model, loaded.
            group: input columns that share a scale; must divide the inputs of every linear layer on this rank.

        Raises:
            UnsupportedQuantization: it does not, or all layers are quantised already.
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
                # A clone, because vLLM's CPU kernels change the dtype of the target's bias in place.
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
    """Return a copy with separate registries of the same parameters, buffers and children."""
    made: nn.Module = object.__new__(type(module))
    made.__dict__.update(module.__dict__)
    for registry in ("_parameters", "_buffers", "_modules"):
        made.__dict__[registry] = dict(module.__dict__[registry])
    return made


class QuantizedSelfDraft:
    """Quantized copy of a runner's model, with its draft loop. A `DraftModel`."""

    def __init__(self, runner: Any, options: W4Options) -> None:
        """Prepare a copy of the runner's model.

        Args:
            runner: vLLM's model runner, its model loaded.
            options: how weights are rounded.

        Raises:
            UnsupportedQuantization: the model cannot have one.
        """
        if runner.model_config.get_num_experts():
            raise UnsupportedQuantization("a mixture of experts has no quantized copy")
        if runner.uses_mrope:
            raise UnsupportedQuantization(
                "a model with positions of several dimensions has no quantized copy"
            )
        self._runner = runner
        self._copy = QuantizedCopy(runner.get_model(), options.group)
        self._version: int | None = None
        self._coming: tuple[int, Iterator[None]] | None = None

    @property
    def nbytes(self) -> int:
        """Memory of the 4-bit weights, in bytes."""
        return self._copy.nbytes

    @property
    def version(self) -> int | None:
        """Version of the target's weights in the copy; None while it is incomplete."""
        return self._version

    def forget(self) -> None:
        """Discard the copy, because the target's weights are about to change."""
        self._version = self._coming = None

    def drop(self) -> None:
        """Free the memory of the copy."""
        self.forget()
        self._copy.drop()

    def begin(self, version: int) -> None:
        """Start to quantize this version of the target's weights; `build` does the work."""
        self._version = None
        self._coming = (version, self._copy.rebuild())

    @torch.inference_mode()
    def build(self, seconds: float) -> bool:
        """Quantize for about `seconds`, at least one slice; returns whether the copy is complete."""
        if self._coming is None:
            return self._version is not None
        version, slices = self._coming
        until = time.perf_counter() + seconds
        for _ in slices:
            if time.perf_counter() >= until:
                return False
        self._version, self._coming = version, None
        return True

    @torch.inference_mode()
    def propose(self, version: int, requests: Sequence[DraftRequest]) -> DraftResult:
        """Draft tokens by sample; fewer than requested at a stop token, or for lack of KV slots.

        Raises:
            StaleDrafter: the copy has other weights.
        """
        if self._version != version:
            raise StaleDrafter(f"the quantized copy is of weights {self._version}, not of {version}")
        rows = DraftRows(self._runner, requests)

        def forward(tokens: IntArray, live: IntArray, step: int) -> torch.Tensor:
            # Reads the sample's latest token first, then each drafted token, at its position.
            starts = rows.positions[live] + step
            read = DraftPass(self._runner, rows.places[live], starts, np.ones(len(live), np.int64))
            model: Any = self._copy.model
            with read.context(step):
                hidden = model(
                    input_ids=on(tokens, self._runner.device),
                    positions=read.positions,
                    intermediate_tensors=None,
                    inputs_embeds=None,
                )
            logits: torch.Tensor = model.compute_logits(hidden)
            return logits

        return DraftResult(rows.draft(np.arange(len(rows)), forward))

    def swap(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `DraftModel`."""
        raise FixedDrafter("the quantized copy's weights are the target's")
