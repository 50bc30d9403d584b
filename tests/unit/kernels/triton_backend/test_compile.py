"""What the entry functions launch, compiled to machine code for CUDA devices without having one.

What was slow once is asserted: registers that spill, narrow loads, loops that wait for each load, Philox drawn
twice, and kernels compiled anew for another batch.
"""

import pytest
import torch

from kernels.kd_loss.triton_kd import FusedLoss
from kernels.kv_pack.layout import BlockLayout, runs
from kernels.kv_pack.triton_copy import copy
from kernels.short_query_attention.triton_attend import attend_triton
from kernels.tuning import Tuning, using
from kernels.w4a16.triton_quantise import quantise_triton
from tests.support.compiled_kernels import WIDTH, attention_step, compile_for, draw, faults, intercepted

EXACT = {"peaks", "raise_floors", "bucket_sums", "collect", "select", "scan"}
"""Kernels whose operations are those of the specification."""
_compiled = {}
"""By specialisation: tests ask for the same kernels."""


class Launches:
    """What was launched, compiled when it is asked for: a kernel takes a second."""

    def __init__(self):
        self._variants = {}

    def take(self, name, kernel, special, options):
        self._variants.setdefault(name, {})[repr((name, special, sorted(options.items())))] = (
            kernel, special, options,
        )  # fmt: skip

    def __contains__(self, name):
        return name in self._variants

    def every(self, name):
        """Return what each variant of a kernel compiles to."""
        for key, variant in self._variants[name].items():
            if key not in _compiled:
                _compiled[key] = compile_for(90, *variant)
        return [_compiled[key] for key in self._variants[name]]

    def __getitem__(self, name):
        """Return what the only variant of a kernel compiles to."""
        (code,) = self.every(name)
        return code

    def __iter__(self):
        return iter(self._variants)


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Collect launches, to be compiled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = Launches()
    with intercepted(found.take):
        yield found


@pytest.fixture
def variants():
    """Collect launches: name -> the variants that Triton would have compiled."""
    found = {}

    def take(name, kernel, special, options):
        found.setdefault(name, set()).add(repr((special, sorted(options.items()))))

    with intercepted(take):
        yield found


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "asked"),
    [
        (4, WIDTH, torch.bfloat16, ()),
        (4, WIDTH, torch.bfloat16, ("masked",)),
        pytest.param(4, WIDTH, torch.bfloat16, ("masked", "edited", "proposing"), marks=pytest.mark.soak),
        pytest.param(1, 1, torch.float32, (), marks=pytest.mark.soak),
        pytest.param(1, 1, torch.float32, ("masked",), marks=pytest.mark.soak),
        pytest.param(1, 1, torch.float32, ("masked", "edited", "proposing"), marks=pytest.mark.soak),
    ],
)
def test_sampler_compiles_and_fuses_no_specified_operation(rows, width, dtype, asked, launched):
    draw(rows, width, dtype, drafts=rows // 2, **dict.fromkeys(asked, True))
    assert set(launched) == (EXACT | {"finish"} if "masked" in asked else {"scan", "finish"})
    codes = {name: launched.every(name) for name in launched}
    assert not any("fma" in code.ptx for name in EXACT & set(codes) for code in codes[name])
    for scan in codes["scan"]:
        assert "div.rn.f32" in scan.ptx
        # Numbers too small to be normal are not flushed to 0.
        assert not scan.count(r"(add|sub|mul|div)\.rn\.ftz")


@pytest.mark.parametrize("wide", [True, False])
def test_the_scan_draws_philox_once_and_loads_16_bytes_ahead(wide, launched):
    with using(Tuning(wide_products=wide)):
        draw(4)
    scan = launched["scan"]
    assert (scan.spilled, scan.bytes_ahead) == (0, {16})
    # Eight blocks a SM of 128 threads.
    assert scan.registers <= 64
    # Two blocks of Philox a thread, of 20 products each; some are of constants. Drawn twice it is 72.
    products = scan.count(r"mul\.lo\.s64|mul\.wide\.u32") if wide else scan.count(r"mul\.hi\.u32")
    assert 25 <= products <= 40
    assert wide is not ("mul.hi.u32" in scan.ptx)


def test_passes_over_the_vocabulary_load_16_bytes_ahead(launched):
    draw(4, masked=True)
    for name in ("peaks", "bucket_sums", "collect"):
        assert {(code.spilled, *code.bytes_ahead) for code in launched.every(name)} == {(0, 16)}, name
    assert {code.spilled for code in launched.every("select")} == {0}


@pytest.mark.parametrize("asked", ["masked", "edited", "proposing"])
def test_rows_that_ask_for_more_stay_within_their_limits(asked, launched):
    draw(4, drafts=2, **{asked: True})
    setting = "proposals" if asked == "proposing" else asked
    for code in launched.every("scan"):
        assert faults("scan", setting, 90, code) == []
        assert code.bytes_ahead == {16}
    assert faults("finish", setting, 90, launched["finish"]) == []


@pytest.mark.parametrize("masked", [False, True])
def test_no_batch_is_a_reason_to_compile_the_sampler_anew(masked, variants):
    for rows, drafts in [(rows, 0) for rows in (1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64, 127, 128)] + [
        (5, 3),
        (48, 31),
    ]:
        draw(rows, drafts=drafts, masked=masked)
    # The search has a variant for top-k and one for top-p, and one more for each of its levels.
    assert {name: len(found) for name, found in variants.items()} == (
        {"peaks": 1, "raise_floors": 1, "bucket_sums": 4, "collect": 2, "select": 2, "scan": 1, "finish": 1}
        if masked
        else {"scan": 1, "finish": 1}
    )


@pytest.mark.parametrize(
    ("queries", "window", "tree", "kv_heads", "size"),
    [
        pytest.param([2, 5], None, False, 2, 128, marks=pytest.mark.soak),
        ([1], 100, False, 1, 256),
        ([0, 3], None, True, 8, 80),
    ],
)
def test_attention_compiles_to_tensor_cores(queries, window, tree, kv_heads, size, launched):
    attend_triton(attention_step(queries, 8 // kv_heads, kv_heads, size, window, tree=tree))
    assert "mma" in launched["_attend"].ptx
    assert 16 in launched["_attend"].bytes_ahead
    assert "_sum_parts" in launched


@pytest.mark.parametrize(
    ("group", "longest"),
    [(4, 5), pytest.param(2, 1, marks=pytest.mark.soak), pytest.param(8, 16, marks=pytest.mark.soak)],
)
def test_attention_has_three_pieces_of_keys_and_values_and_two_programs_a_multiprocessor(
    group, longest, launched
):
    attend_triton(attention_step([longest] * 4, group, longest=longest))
    code = launched["_attend"]
    assert code.spilled == 0
    # Keys and values in pieces of 16 bytes; entries of the block table, of 4 bytes, earlier still.
    assert code.bytes_ahead == {4, 16}
    piece = 2 * 32 * 128 * 2
    assert 3 * piece <= code.shared <= 227 * 1024 // 2
    assert code.registers * 128 * 2 <= 65536
    assert launched["_sum_parts"].spilled == 0


def test_no_batch_is_a_reason_to_compile_attention_anew(variants):
    for requests in (1, 2, 15, 16, 17, 128):
        for longest in (1, 4, 16):
            attend_triton(attention_step([1] * requests, 2, longest=longest))
    for blocks in (1, 16, 31):
        attend_triton(attention_step([1], 2, longest=1, blocks=blocks))
    # Tiles of 16 and of 32 rows.
    assert {name: len(found) for name, found in variants.items()} == {"_attend": 2, "_sum_parts": 2}


def test_rounding_to_4_bits_compiles_and_fuses_nothing(launched):
    quantise_triton(torch.zeros(256, 1024, dtype=torch.bfloat16), 128, False, torch.bfloat16)
    assert "fma" not in launched["_quantise"].ptx
    assert launched["_quantise"].spilled == 0


def copy_blocks(caches, blocks, tokens):
    shape = runs(caches[0].shape, BlockLayout(), len(blocks), tokens)
    buffer = torch.empty(len(caches), shape.elements, dtype=torch.bfloat16)
    copy(caches, torch.tensor(blocks), buffer, shape, unpacking=False)


@pytest.mark.parametrize(("blocks", "tokens"), [([3, 1, 2], 40), ([3], 16)])
def test_a_copy_moves_16_bytes_at_once(blocks, tokens, launched):
    copy_blocks([torch.zeros(9, 2, 16, 256, dtype=torch.bfloat16)] * 2, blocks, tokens)
    assert launched["_copy_runs"].count(r"ld\.global\.v2\.b64")
    assert launched["_copy_runs"].count(r"st\.global\.v2\.b64")


def test_no_request_is_a_reason_to_compile_the_copy_anew(variants):
    caches = [torch.zeros(99, 2, 16, 256, dtype=torch.bfloat16)] * 2
    for count in (3, 16, 17, 48):
        for rest in (1, 5, 16):
            copy_blocks(caches, list(range(count)), (count - 1) * 16 + rest)
    assert len(variants["_copy_runs"]) == 1


def test_the_loss_loads_16_bytes_ahead(launched):
    student = torch.empty(3, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    FusedLoss.apply(student, student.detach(), torch.ones(3), 1.0).sum().backward()
    assert set(launched) == {"_forward", "_backward"}
    assert launched["_forward"].bytes_ahead == {16}
    assert launched["_backward"].count(r"ld\.global\.v4\.b32")
    assert launched["_forward"].spilled == launched["_backward"].spilled == 0
