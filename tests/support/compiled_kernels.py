"""Compile the launches of the entry functions for devices that are not available, and report their resources.

    python -m tests.support.compiled_kernels                      # for compute capabilities 8.0, 8.9, 9.0 and 10.0
    python -m tests.support.compiled_kernels --arch 90 --json codes.json

For each kernel and variant it prints registers a thread, bytes spilled, shared memory, the widest load, the bytes
of each asynchronous copy, and the number of machine instructions, and whether they are within the limits. The
status is 1 if anything is outside them or does not compile. It runs with the installed Triton;
`scripts/compiled-kernels` runs it with other versions.

The launches use tensors without contents. Nothing here may run on a device, because memory is not initialised.
"""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kernels import backend
from kernels.coupled_sampler.proposals import RowProposals
from kernels.coupled_sampler.sample import Edited, sample
from kernels.short_query_attention import AttentionStep

WIDTH = 151_936


def draw(
    rows: int,
    width: int = WIDTH,
    dtype: torch.dtype = torch.bfloat16,
    drafts: int = 0,
    *,
    masked: bool = False,
    edited: bool = False,
    proposing: bool = False,
) -> None:
    """Sample `rows` rows, of which the last request has `drafts` + 1."""
    cu = torch.tensor([*range(rows - drafts), rows])
    count = len(cu) - 1
    ids = torch.zeros(count, dtype=torch.int64)
    more: dict[str, Any] = {}
    if masked:
        more = {"top_k": ids, "top_p": torch.ones(count), "min_p": torch.ones(count)}
    if edited:
        more["edited"] = Edited(torch.arange(1), torch.empty(1, width))
    if proposing:
        none = torch.zeros(rows, dtype=torch.bool)
        tokens = torch.zeros(rows, dtype=torch.int64)
        more["proposals"] = RowProposals(tokens, torch.zeros(rows), none, none[:count])
    sample(
        torch.empty(rows, width, dtype=dtype), ids, ids, torch.ones(count), ids.new_zeros(drafts), cu,
        backend="triton", **more,
    )  # fmt: skip


def attention_step(
    queries: list[int],
    group: int,
    kv_heads: int = 8,
    size: int = 128,
    window: int | None = None,
    *,
    tree: bool = False,
    longest: int = 5,
    blocks: int = 9,
) -> AttentionStep:
    """Return a step of requests; `queries` lists the query tokens of each."""
    cu = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    cache = torch.zeros(blocks, 16, kv_heads, 2 * size, dtype=torch.bfloat16)
    keys, values = cache.split(size, dim=-1)
    return AttentionStep(
        query=torch.zeros(int(cu[-1]), group * kv_heads, size, dtype=torch.bfloat16),
        keys=keys,
        values=values,
        block_table=torch.zeros(len(queries), 64, dtype=torch.int32),
        lengths=torch.zeros(len(queries), dtype=torch.int32),
        cu_queries=cu,
        longest_query=longest,
        longest=1024,
        scale=0.1,
        window=window,
        tree=torch.zeros(int(cu[-1]), dtype=torch.int64) if tree else None,
    )


def attending(group: int, longest: int) -> None:
    """Attend with `group` heads in each group, and up to `longest` query tokens."""
    from kernels.short_query_attention.triton_attend import attend_triton

    attend_triton(attention_step([longest] * 4, group, longest=longest))


def losing() -> None:
    """Compute the distillation loss, forwards and backwards."""
    from kernels.kd_loss.triton_kd import FusedLoss

    student = torch.empty(3, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    FusedLoss.apply(student, student.detach(), torch.ones(3), 1.0).sum().backward()  # type: ignore[no-untyped-call]


def rounding() -> None:
    """Round a matrix to 4 bits."""
    from kernels.w4a16.triton_quantise import quantise_triton

    quantise_triton(torch.zeros(256, 1024, dtype=torch.bfloat16), 128, False, torch.bfloat16)


def copying() -> None:
    """Pack the blocks of a request."""
    from kernels.kv_pack.layout import BlockLayout, runs
    from kernels.kv_pack.triton_copy import copy

    caches = [torch.zeros(9, 2, 16, 256, dtype=torch.bfloat16)] * 2
    shape = runs(caches[0].shape, BlockLayout(), 3, 40)
    buffer = torch.empty(len(caches), shape.elements, dtype=torch.bfloat16)
    copy(caches, torch.tensor([3, 1, 2]), buffer, shape, unpacking=False)


LAUNCHES: dict[str, Callable[[], None]] = {
    "plain": partial(draw, 4, drafts=2),
    "masks": partial(draw, 4, drafts=2, masked=True),
    "edited rows": partial(draw, 4, drafts=2, edited=True),
    "proposals": partial(draw, 4, drafts=2, proposing=True),
    "proposals, masks, edited rows": partial(draw, 4, drafts=2, masked=True, edited=True, proposing=True),
    "groups of 2, decoding": partial(attending, 2, 1),
    "groups of 4, 4 drafts": partial(attending, 4, 5),
    "groups of 8, 15 drafts": partial(attending, 8, 16),
    "loss": losing,
    "rounding": rounding,
    "copies": copying,
}


ARCHITECTURES = (80, 89, 90, 100)
Special = tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]
Take = Callable[[str, Any, Special, dict[str, Any]], None]
_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.uint8: "u8",
}


@dataclass(frozen=True, slots=True)
class Code:
    """PTX, and the resources of the machine code: registers a thread, bytes spilled, bytes of shared memory."""

    ptx: str
    registers: int
    spilled: int
    shared: int
    instructions: int

    def count(self, pattern: str) -> int:
        """Return the number of matches of a pattern in the PTX."""
        return len(re.findall(pattern, self.ptx))

    @property
    def bytes_ahead(self) -> set[int]:
        """Bytes of each asynchronous copy, which a loop starts ahead of use."""
        pattern = r"cp\.async\.c[ag]\.shared\.global [^;]*?, (0x\w+|\d+)"
        return {int(size, 0) for size in re.findall(pattern, self.ptx)}

    @property
    def widest(self) -> int:
        """Bytes of the widest load from global memory, asynchronous ones included."""
        loads = re.findall(r"ld\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)", self.ptx)
        return max([int(n or 1) * int(bits) // 8 for n, bits in loads] + list(self.bytes_ahead), default=0)


def specialised(kernel: Any, values: dict[str, Any]) -> Special:
    """Return signature, constants and alignments, by which Triton distinguishes variants of a kernel."""
    signature: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    aligned: dict[Any, Any] = {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        special = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or (special and value == 1):
            signature[parameter.name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + _NAMES[value.dtype]
            if value.data_ptr() % 16 == 0:
                aligned[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if special and value % 16 == 0:
                aligned[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, aligned


@contextmanager
def intercepted(take: Take) -> Iterator[None]:
    """Pass launches to `take` (name, kernel, specialisation, options) instead of making them, on any device."""

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        options = {name: values.pop(name) for name in set(values) - set(kernel.arg_names)}
        take(kernel.fn.__name__, kernel, specialised(kernel, values), options)

    before, interpreted = JITFunction.run, backend.interpreted
    JITFunction.run, backend.interpreted = run, lambda: True  # type: ignore[assignment]
    try:
        yield
    finally:
        JITFunction.run, backend.interpreted = before, interpreted


def compile_for(capability: int, kernel: Any, special: Special, options: dict[str, Any]) -> Code:
    """Compile for a compute capability, 90 for 9.0. Raises if any stage down to machine code fails."""
    result = triton.compile(
        ASTSource(kernel, *special), target=GPUTarget("cuda", capability, 32), options=options
    )
    ptxas = Path(get_ptxas(capability).path)
    target = f"sm_{capability}{'a' if capability >= 90 else ''}"
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(result.asm["ptx"])
        command = [str(ptxas), "-v", f"--gpu-name={target}", str(source), "-o", str(binary)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        listing = [str(ptxas.with_name("nvdisasm")), "-c", str(binary)]
        found = subprocess.run(listing, capture_output=True, text=True)
    registers = re.search(r"Used (\d+) registers", said)
    spilled = re.search(r"(\d+) bytes spill stores", said)
    assert registers is not None
    lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?!NOP|BRA `)\S", found.stdout, re.MULTILINE)
    return Code(
        result.asm["ptx"],
        int(registers[1]),
        int(spilled[1]) if spilled else 0,
        int(result.metadata.shared),
        len(lines),
    )


def codes(capability: int) -> Iterator[tuple[str, str, Code | Exception]]:
    """Compile every kernel in every setting; yield (setting, kernel, code or error)."""
    seen: set[str] = set()
    for setting, launch in LAUNCHES.items():
        pending: list[tuple[str, Any, Special, dict[str, Any]]] = []
        with intercepted(lambda *launched: pending.append(launched)):  # noqa: B023
            launch()
        for name, kernel, special, options in pending:
            key = repr((name, special, sorted(options.items())))
            if key in seen:
                continue
            seen.add(key)
            try:
                yield setting, name, compile_for(capability, kernel, special, options)
            except Exception as error:  # A compiler's errors are of many kinds.
                yield setting, name, error


def most_registers(kernel: str, setting: str, capability: int) -> int:
    """Return the maximum registers a thread for a kernel.

    Scan: 64, since a multiprocessor has 65,536 for eight programs of 128 threads. For 8.0 and 8.9 ptxas uses up to
    66 by itself. With `--maxrregcount` 64 it keeps to the limit and spills nothing, so the code does not need more.
    This costs one program of eight, on devices that nothing here is tuned for. With proposals the scan sums 64-bit
    masses, and five programs must suffice, because such rows are few. Attention: two programs. All others only must
    not spill.
    """
    if kernel == "_attend":
        return 256
    if kernel != "scan":
        return 255
    if "proposals" in setting:
        return 96
    return 64 if capability >= 90 else 72


def faults(kernel: str, setting: str, capability: int, code: Code) -> list[str]:
    """Return how the code of a kernel exceeds its limits."""
    most = most_registers(kernel, setting, capability)
    found = []
    if code.registers > most:
        found.append(f"more than {most} registers")
    if code.spilled:
        found.append(f"{code.spilled} bytes spilled")
    if kernel in ("scan", "peaks", "bucket_sums", "collect", "_forward") and code.widest < 16:
        found.append("loads of less than 16 bytes")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print the table for each architecture; return 1 if anything is outside its limits."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.compiled_kernels", description=__doc__)
    parser.add_argument(
        "--arch", type=int, nargs="+", default=ARCHITECTURES, help="compute capabilities, 90 for 9.0"
    )
    parser.add_argument("--json", type=Path, help="file for the same as JSON")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for capability in options.arch:
        print(f"Triton {triton.__version__}, compute capability {capability / 10}")
        print(
            f"{'kernel':14}{'setting':34}{'regs':>5}{'spill':>6}{'shared':>8}{'widest':>7}{'instr':>7}  limits"
        )
        for setting, name, code in codes(capability):
            row: dict[str, Any] = {"arch": capability, "kernel": name, "setting": setting}
            if isinstance(code, Exception):
                wrong = [f"{type(code).__name__}: {str(code).splitlines()[-1][:80] if str(code) else ''}"]
                numbers = f"{'':33}"
            else:
                wrong = faults(name, setting, capability, code)
                row |= {key: value for key, value in asdict(code).items() if key != "ptx"}
                row |= {"widest": code.widest, "ahead": sorted(code.bytes_ahead)}
                numbers = (
                    f"{code.registers:5}{code.spilled:6}{code.shared:8}{code.widest:7}{code.instructions:7}"
                )
            print(f"{name:14}{setting:34}{numbers}  {'; '.join(wrong) or 'within'}", flush=True)
            rows.append(row | {"wrong": wrong})
    if options.json:
        options.json.write_text(json.dumps({"triton": triton.__version__, "rows": rows}, indent=1) + "\n")
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
