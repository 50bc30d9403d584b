"""LoRA adapters in PEFT's layout: checks whether they can be merged, and the merge.

W + scale * B @ A in float32, rounded to the dtype of W. Every instance gets the same bits: the sums have an order
(`kernels.lora_merge`), and parts of a tensor that threads share do not depend on each other.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import Violation
from paceline.files import read_object
from paceline.weights.adapters import BY_FLEET, CONFIG, refused
from services.contracts.errors import DataLoss, InvalidArgument
from services.generation.weights.files import MappedTensors, open_weight_files

Floats = npt.NDArray[np.float32]

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_BLOCK_BYTES = 4 << 20
_MOST_CONFIG_BYTES = 4 << 20
_MERGED = {torch.bfloat16, torch.float16, torch.float32}


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """Matrices of an adapter by the tensor that their product is added to: B and A."""

    scale: float
    pairs: Mapping[str, tuple[str, str]]


def read_adapter(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[AdapterPlan, MappedTensors]:
    """Return the plan of a merge with tensors of these shapes, and the adapter's matrices.

    Raises:
        InvalidArgument: the folder has no adapter, or one that cannot be merged.
        DataLoss: its files are corrupt.
    """
    try:
        config = read_object(folder / CONFIG, _MOST_CONFIG_BYTES)
    except FileNotFoundError as error:
        raise InvalidArgument([Violation("disk.path", f"{folder} has no {CONFIG}")]) from error
    except (OSError, ValueError) as error:
        raise DataLoss(f"{folder / CONFIG} is corrupt: {error}") from error
    stored = {
        name: file
        for file in open_weight_files(folder, indexed=False, served=len(shapes))
        for name in file.tensors
    }
    found = {name: file.tensors[name].shape for name, file in stored.items()}
    plan = plan_merge(config, found, shapes)
    matrices = MappedTensors(stored)
    wrong = [
        _violation(name, f"has dtype {stored[name].tensors[name].dtype}, allowed are BF16, F16, F32")
        for name in sorted(stored)
        if stored[name].tensors[name].torch_dtype not in _MERGED
    ]
    if wrong:
        raise InvalidArgument(wrong[:16])
    return plan, matrices


def plan_merge(
    config: Mapping[str, Any], found: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> AdapterPlan:
    """Return the plan of a merge.

    Args:
        config: content of `adapter_config.json`.
        found: shapes of the adapter's tensors.
        shapes: of the base's.

    Raises:
        InvalidArgument: an option, a tensor or a shape that cannot be merged; the error names it.
    """
    violations = [
        Violation(f"{CONFIG}.{option}", f"is {value!r}, which cannot be merged; {_allowed(option)}")
        for option, value in refused(config, BY_FLEET).items()
    ]
    rank, alpha = config.get("r"), config.get("lora_alpha")
    # A higher rank adds nothing, and its matrices could have any size.
    most = max((length for shape in shapes.values() for length in shape), default=sys.maxsize)
    if type(rank) is not int or not 1 <= rank <= most:
        violations.append(Violation(f"{CONFIG}.r", f"is {rank!r}, must be an integer from 1 to {most}"))
    # Compared, since an integer may be too large to become a float.
    largest = sys.float_info.max
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not -largest <= alpha <= largest:
        violations.append(Violation(f"{CONFIG}.lora_alpha", f"is {alpha!r}, must be a number"))
    if violations:
        raise InvalidArgument(violations)
    pairs: dict[str, tuple[str, str]] = {}
    for name in sorted(found):
        violations += _pair(name, found, shapes, rank, config.get("target_modules"), pairs)
    if not found:
        violations.append(Violation("disk.path", "the adapter has no tensors"))
    if violations:
        raise InvalidArgument(violations[:16])
    assert isinstance(rank, int)
    assert isinstance(alpha, int | float)
    return AdapterPlan(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), pairs)


def merged(
    base: Mapping[str, torch.Tensor], plan: AdapterPlan, matrices: Mapping[str, torch.Tensor], threads: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the base with the adapter added; one of them is in memory at a time."""
    with ThreadPoolExecutor(threads, "merge") as pool:
        for name, tensor in base.items():
            if name not in plan.pairs:
                yield name, tensor
                continue
            b, a = (_as_float32(matrices[each].contiguous()) for each in plan.pairs[name])
            yield name, _merge(tensor, b, a, plan.scale, pool)


def _merge(
    tensor: torch.Tensor, b: Floats, a: Floats, scale: float, pool: ThreadPoolExecutor
) -> torch.Tensor:
    """Return a tensor with the product added, made in blocks of rows."""
    # Imports numba, which vLLM must come before.
    from kernels.lora_merge import add_product

    result = torch.empty_like(tensor)
    rows = max(1, _BLOCK_BYTES // max(1, 4 * tensor.shape[1]))

    def block(first: int) -> None:
        part = slice(first, first + rows)
        weights = _as_float32(tensor[part])
        add_product(weights, b[part], a, scale)
        _numbers(result[part])[...] = _rounded(weights, tensor.dtype)

    for _ in pool.map(block, range(0, len(tensor), rows)):
        pass
    return result


def _numbers(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a numpy view of a tensor; of bfloat16, which numpy does not have, the bits."""
    bits = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
    numbers: npt.NDArray[Any] = bits.numpy()
    return numbers.view(np.uint16) if tensor.dtype is torch.bfloat16 else numbers


def _as_float32(tensor: torch.Tensor) -> Floats:
    """Return a copy, made by numpy: torch would wake a pool of threads in addition to the engine's."""
    numbers = _numbers(tensor)
    if tensor.dtype is torch.bfloat16:
        return (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return numbers.astype(np.float32)


def _rounded(weights: Floats, dtype: torch.dtype) -> npt.NDArray[Any]:
    """Return float32 rounded to the nearest value of a dtype, ties to even."""
    if dtype is not torch.bfloat16:
        # Values too large for float16 become infinite, and staging refuses them by name.
        with np.errstate(over="ignore"):
            return weights.astype(np.float16 if dtype is torch.float16 else np.float32)
    bits = weights.view(np.uint32)
    nearest = (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(16)
    return np.where(np.isnan(weights), np.uint16(0x7FC0), nearest.astype(np.uint16))


def _pair(
    name: str,
    found: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    rank: Any,
    targets: Any,
    pairs: dict[str, tuple[str, str]],
) -> Iterator[Violation]:
    """Add the pair that a tensor of the adapter belongs to, or yield why there is none."""
    ending = next((each for each in (_A, _B) if name.endswith(each)), None)
    if ending is None:
        yield _violation(name, "is no lora_A.weight or lora_B.weight, which are all that can be merged")
        return
    stem = name.removesuffix(ending)
    module = stem.removeprefix(_PREFIX)
    target = f"{module}.weight"
    other = stem + (_B if ending == _A else _A)
    if other not in found:
        yield _violation(name, f"has no {other} beside it")
    elif target not in shapes or len(shapes[target]) != 2:
        yield _violation(name, f"is for {target}, which is no matrix of the model")
    elif isinstance(targets, list) and not any(f".{module}".endswith(f".{each}") for each in targets):
        yield _violation(name, f"is for {module}, which target_modules does not name")
    else:
        rows, columns = shapes[target]
        wanted = (rank, columns) if ending == _A else (rows, rank)
        if found[name] != wanted:
            yield _violation(name, f"has shape {list(found[name])}, allowed is {list(wanted)}")
        pairs[target] = (stem + _B, stem + _A)


def _violation(name: str, text: str) -> Violation:
    return Violation(f"tensors[{name}]", text)


def _allowed(option: str) -> str:
    """Return the values of an option that can be merged, in words."""
    values = BY_FLEET.get(option)
    return f"allowed: {', '.join(map(repr, values))}" if values else "it is not known here: leave it out"
