"""Choose the files that the pack takes from each wheel, and shrink them.

It keeps the files that one Hopper GPU loads to serve dense models of head size 128 in bfloat16, with an engine that
is started from Python. The table below leaves out the rest, each entry with the reason why an engine starts without
it. Kernels with PTX alone, such as Marlin's for 4-bit weights, are left out too.
"""

from __future__ import annotations

import re
import subprocess
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.gpu_pack.fatbin import Container, Pruned, containers, kernel_names, prune
from deploy.gpu_pack.wheels import PackError

ARCHITECTURE = 90
"""Compute capability of the H100 and the H200."""
LEFT_OUT = {
    "vllm/vllm_flash_attn/_vllm_fa2": "Hopper takes FlashAttention 3; the import is guarded",
    "vllm/vllm-rs": "front end in Rust; engines are started from Python",
    "vllm/third_party/deep_gemm": "FP8 products, and needs the C++ ABI of another torch",
    "vllm/third_party/fmha_sm100": "attention of Blackwell",
    "vllm/third_party/tml_fa4": "attention of Blackwell",
    "vllm/_flashkda": "linear attention",
    "vllm/_flashmla": "latent attention",
    "vllm/_deepselect": "sparse attention",
    "vllm/_qutlass": "FP4 products, and needs a later torch",
    "vllm/distributed/kv_transfer/disagg": "examples",
    "vllm/entrypoints/serve/instrumentator/static": "pages of the HTTP server",
    "mistral_common/data": "tokenizers",
    "mistral_common/tokens/tokenizers/data": "tokenizers",
    "pycountry/locales": "translations",
}
"""Path prefix -> reason why the files are not needed."""
_SOURCES = (".pyi", ".hpp", ".cuh", ".cu")
_OTHER_GPUS = re.compile(
    r"vllm/(model_executor|kernels)/.*configs/.*(?:device_name=(?!NVIDIA_H[12]00)|nvidia_(?!h[12]00)).*\.json$"
)
"""Launch parameters that were tuned on other GPUs; the file names contain the GPU."""
_TILE = (
    r"CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1>, cute::C<1>, cute::C<1> >, "
    r"cute::tuple<cute::C<\d+>, cute::C<\d+>, cute::C<128> >, 128, cutlass::bfloat16_t"
)
_KERNELS = {"_vllm_fa3_C": re.compile(rf"{_TILE}|FlashAttnFwdCombine|prepare_varlen")}
"""Library -> the translation units that stay, by the names of their kernels. FlashAttention 3 keeps kernels for
head size 128 in bfloat16 (paged, split and packed or not), and kernels that every forward pass needs."""


@dataclass(frozen=True, slots=True)
class Member:
    """A file of a wheel: its name there, its path in the pack, its size, and why it is left out ("": kept)."""

    wheel: Path
    name: str
    target: str
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class Library:
    """A library with device code: bytes of the file, and of its device code."""

    target: str
    size: int
    code: Pruned


def members(wheels: Iterable[Path]) -> Iterator[Member]:
    """Yield the files of wheels, excluded ones too, in the order of their paths in each wheel."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for info in sorted(archive.infolist(), key=lambda each: each.filename):
                if not info.is_dir():
                    target = _installed(info.filename)
                    yield Member(wheel, info.filename, target, info.file_size, _left_out(target))


def _installed(name: str) -> str:
    """Return where an installer puts a file of a wheel, below site-packages; scripts and headers stay outside."""
    folder, _, rest = name.partition("/")
    if not folder.endswith(".data"):
        return name
    scheme, _, path = rest.partition("/")
    return path if scheme in ("purelib", "platlib") else ""


def _left_out(target: str) -> str:
    if not target:
        return "scripts and headers"
    for prefix, reason in LEFT_OUT.items():
        if target.startswith(prefix):
            return reason
    if _OTHER_GPUS.match(target):
        return "launch parameters of other GPUs"
    if target.endswith((*_SOURCES, ".dist-info/RECORD")):
        return "sources and lists of files"
    return ""


def shrunk(target: str, data: bytes) -> tuple[bytes, Library | None]:
    """Return the contents of a file in the pack, and its library record if it is a library with device code.

    Raises:
        FatbinError: a library of vLLM that cannot be read.
        PackError: none of the kernels that are to stay is there, or a tool is missing.
    """
    if not (target.startswith("vllm/") and target.endswith(".so")):
        return data, None
    found = containers(data)
    if not found:
        return data, None
    written = bytearray(data)
    wanted = _wanted(target, data, found)
    code = prune(written, found, ARCHITECTURE, lambda each: each in wanted)
    if not code.kept:
        raise PackError(f"{target}: no machine code for sm_{ARCHITECTURE} would be left")
    return bytes(written), Library(target, len(data), code)


def _wanted(target: str, data: bytes, found: Sequence[Container]) -> list[Container]:
    stem = Path(target).name.partition(".")[0]
    if stem not in _KERNELS:
        return list(found)
    names = [kernel_names(data, container, ARCHITECTURE) for container in found]
    readable = _demangled(set().union(*names))
    return [
        container
        for container, mangled in zip(found, names, strict=True)
        if any(_KERNELS[stem].search(readable[name]) for name in mangled)
    ]


def _demangled(names: set[str]) -> dict[str, str]:
    """Return readable C++ names. PackError without c++filt, which is part of binutils."""
    mangled = sorted(names)
    try:
        said = subprocess.run(
            ["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True
        )
    except FileNotFoundError:
        raise PackError("c++filt is not there; install binutils") from None
    return dict(zip(mangled, said.stdout.splitlines(), strict=True))
