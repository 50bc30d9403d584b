"""Tensors of torch: in prompts, and as weights; what holds no values is refused by its name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline import Group, InvalidArgumentError, convert
from paceline.weights import safetensors
from paceline.weights.safetensors import check


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"w": torch.empty(2, device="meta")}, "tensor 'w' is on the meta device"),
        ({"w": torch.eye(2).to_sparse()}, "tensor 'w' has the layout torch.sparse_coo"),
        ({"w": [1.0]}, "tensor 'w' is a list"),
        ({"w": None}, "tensor 'w' is a NoneType"),
        ({"w": torch.zeros(2, dtype=torch.complex64)}, "tensor 'w' has dtype complex64"),
        ({"w": SimpleNamespace(full_tensor=None)}, "tensor 'w' is a DTensor"),
        ({3: torch.zeros(2)}, "the weights have a tuple"),
        (torch.nn.Linear(1, 1), "the weights are a Linear; give what its state_dict"),
        ([torch.zeros(2)], "the weights have a Tensor"),
        ("w", "the weights are a str"),
        (5, "the weights are a int"),
        (None, "the weights are a NoneType"),
    ],
)
def test_what_is_no_tensor_is_refused_by_its_name(tmp_path: Path, tensors: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check(tensors)
    with pytest.raises(ValueError, match=said):
        safetensors.write(tmp_path, tensors)


def test_bits_that_say_minus_are_resolved(tmp_path: Path) -> None:
    negative = torch.tensor([1 + 2j]).conj().imag
    assert negative.is_neg()
    safetensors.write(tmp_path, {"w": negative})
    assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], torch.tensor([-2.0]))


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        (torch.tensor([[1, 2]]), [1, 2]),
        (torch.tensor([1, 2], dtype=torch.int32), [1, 2]),
        (list(torch.tensor([1, 2])), [1, 2]),
        (torch.tensor([1.0, 2.0], requires_grad=True), [1, 2]),
    ],
)
def test_prompts_may_be_tensors(prompt: Any, ids: list[int]) -> None:
    (group,) = convert.whole_groups([Group("p", prompt, torch.tensor(2))])  # type: ignore[arg-type]
    assert (group.prompt_token_ids, group.samples) == (ids, 2)


@pytest.mark.parametrize("prompt", [torch.empty(2, device="meta"), torch.ones(2, dtype=torch.bfloat16)])
def test_tensors_that_hold_no_ids_are_refused_by_name(prompt: Any) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"groups\[0\]\.prompt_token_ids: is a tensor whose values"
    ):
        convert.whole_groups([Group("p", prompt, 1)])
