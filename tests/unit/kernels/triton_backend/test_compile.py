"""What the entry functions launch, compiled to machine code for CUDA devices without having one."""

import re

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kernels.coupled_sampler import Domain
from kernels.coupled_sampler.triton_sample import sample_triton
from kernels.kd_loss.triton_kd import FusedLoss
from kernels.kv_pack.layout import BlockLayout, runs
from kernels.kv_pack.triton_copy import copy
from kernels.short_query_attention import AttentionStep
from kernels.short_query_attention.triton_attend import attend_triton
from kernels.w4a16 import quantise
from kernels.w4a16.triton_matmul import matmul_triton
from kernels.w4a16.triton_quantise import quantise_triton

NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.uint8: "u8",
}


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Collect launches instead of making them: name -> PTX of the kernel as it would have been launched."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = {}

    def run(kernel, *args, grid, warmup, **kwargs):
        values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        options = {name: values.pop(name) for name in set(values) - set(kernel.arg_names)}
        found[kernel.fn.__name__] = compiled(kernel, values, options)

    monkeypatch.setattr(JITFunction, "run", run)
    return found


def compiled(kernel, values, options):
    """PTX for compute capability 9.0; raises if any stage down to machine code fails."""
    signature, constants, aligned = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        special = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or (special and value == 1):
            signature[parameter.name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + NAMES[value.dtype]
            aligned[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if special and value % 16 == 0:
                aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert result.asm["cubin"]
    return result.asm["ptx"]


@pytest.mark.parametrize(
    ("cu", "width", "dtype"), [([0, 1, 4], 5000, torch.bfloat16), ([0, 1], 1, torch.float32)]
)
def test_sampler_compiles_and_fuses_no_specified_operation(cu, width, dtype, launched):
    logits = torch.zeros(cu[-1], width, dtype=dtype)
    ids = torch.zeros(len(cu) - 1, dtype=torch.int64)
    floats = torch.ones(len(cu) - 1)
    for masks in ((None, None), (ids, floats)):
        sample_triton(logits, ids, ids, floats, ids, torch.tensor(cu), *masks, Domain.TOKEN)
        assert "fma" not in launched["scan"]
        assert "div.rn.f32" in launched["scan"]
        # Numbers too small to be normal are not flushed to 0.
        assert not re.search(r"(add|sub|mul|div)\.rn\.ftz", launched["scan"])
    assert "fma" not in launched["thresholds"]
    assert "finish" in launched


@pytest.mark.parametrize(
    ("cu", "window", "tree", "kv_heads", "size"),
    [([0, 2, 7], None, False, 2, 128), ([0, 1], 100, False, 1, 256), ([0, 0, 3], None, True, 8, 80)],
)
def test_attention_compiles_to_tensor_cores(cu, window, tree, kv_heads, size, launched):
    keys = torch.zeros(9, 16, kv_heads, size, dtype=torch.bfloat16)
    step = AttentionStep(
        query=torch.zeros(cu[-1], 8, size, dtype=torch.bfloat16),
        keys=keys,
        values=keys,
        block_table=torch.zeros(len(cu) - 1, 64, dtype=torch.int32),
        lengths=torch.zeros(len(cu) - 1, dtype=torch.int32),
        cu_queries=torch.tensor(cu, dtype=torch.int32),
        longest_query=5,
        longest=1024,
        scale=0.1,
        window=window,
        tree=torch.zeros(cu[-1], dtype=torch.int64) if tree else None,
    )
    attend_triton(step, programs_wanted=264, least_piece=16)
    assert "mma" in launched["_attend"]
    assert "cp.async.cg" in launched["_attend"]  # keys and values come 16 bytes at a time, ahead of their use
    assert "_sum_pieces" in launched


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_w4a16_compiles(rows, launched):
    weight = torch.zeros(256, 1024, dtype=torch.bfloat16)
    quantise_triton(weight, 128, False, torch.bfloat16)
    assert "fma" not in launched["_quantise"]
    matmul_triton(
        torch.zeros(rows, 1024, dtype=torch.bfloat16), quantise(weight, symmetric=False, backend="reference")
    )
    assert "mma" in launched["_matmul"]
    assert "_add" in launched


@pytest.mark.parametrize(("blocks", "tokens"), [([3, 1, 2], 40), ([3], 16), ([3], 1)])
def test_copy_compiles(blocks, tokens, launched):
    caches = [torch.zeros(9, 2, 16, 256, dtype=torch.bfloat16)] * 2
    shape = runs(caches[0].shape, BlockLayout(), len(blocks), tokens)
    copy(
        caches,
        torch.tensor(blocks),
        torch.zeros(2, shape.elements, dtype=torch.bfloat16),
        shape,
        unpacking=False,
    )
    assert "ld.global" in launched["_copy_runs"]


def test_loss_compiles(launched):
    student = torch.zeros(3, 5000, dtype=torch.bfloat16, requires_grad=True)
    FusedLoss.apply(student, student.detach(), torch.ones(3), 1.0).sum().backward()
    assert set(launched) == {"_forward", "_backward"}
