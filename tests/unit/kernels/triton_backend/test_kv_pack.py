"""The copy kernel moves the reference's bytes, and nothing else."""

import pytest
import torch

from kernels.kv_pack import BlockLayout, pack, packed_shape, unpack

LAYOUTS = [
    (BlockLayout(0, 2), (9, 2, 8, 6)),
    (BlockLayout(1, 2), (2, 9, 8, 3, 4)),
    (BlockLayout(0, 1), (9, 8, 5)),
]


@pytest.mark.parametrize(("layout", "shape"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize(("blocks", "tokens"), [([3, 1, 8], None), ([0], 3), ([8, 0, 4], 17), ([], None)])
def test_moves_what_the_reference_moves(layout, shape, dtype, blocks, tokens, device):
    caches = [torch.randint(0, 100, shape).to(device, dtype) for _ in range(2)]
    index = torch.tensor(blocks, dtype=torch.int64)
    size = packed_shape(caches, len(blocks), tokens, layout)
    expected, found = (torch.full(size, 111).to(device, dtype) for _ in range(2))
    pack(caches, index, expected, tokens=tokens, layout=layout, backend="reference")
    pack(caches, index, found, tokens=tokens, layout=layout, backend="triton")
    assert torch.equal(found, expected)

    there = torch.randperm(9)[: len(blocks)]
    expected, found = ([torch.full(shape, 77).to(device, dtype) for _ in caches] for _ in range(2))
    packed = torch.randint(0, 50, size).to(device, dtype)
    unpack(packed, expected, there, tokens=tokens, layout=layout, backend="reference")
    unpack(packed, found, there, tokens=tokens, layout=layout, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
