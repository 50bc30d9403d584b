"""The real pack on a machine like the GPU machine, but for its GPU: libraries load, and engines come to the device.

The first run downloads 350 MB of wheels and 3 GB for the environment (5.4 GB on disk), which stay in runs/.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.sizes import EngineKind, Graphs
from deploy.gpu_pack.build import LIMIT, Listing, read
from tests.support import pretended_gpu
from tests.support.soak import record

ROOT = Path(__file__).parents[3]
PRETENDED = Path(pretended_gpu.__file__).parent
REQUIREMENTS = ROOT / "requirements/gpu-machine.txt"
ENVIRONMENT = ROOT / "runs/gpu-machine"
UV = ROOT / ".venv.uv/bin/uv"
DISK = 12 * 2**30
ENGINES = [
    # The machine has no arctic-inference: a run says so in the table.
    *((kind, Graphs.FULL, "bfloat16") for kind in EngineKind if kind is not EngineKind.STOCK_SUFFIX),
    (EngineKind.STOCK, Graphs.DEFAULT, "bfloat16"),
    (EngineKind.V1, Graphs.DEFAULT, "bfloat16"),
    (EngineKind.V1, Graphs.FULL, "float32"),
]
"""Engines of a run, as it builds them."""
OPERATORS = {
    "vllm/_C_stable_libtorch.abi3.so": {"_C::rms_norm", "_C::rotary_embedding", "_C::silu_and_mul"},
    "vllm/_moe_C_stable_libtorch.abi3.so": {"_moe_C::topk_softmax"},
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": {"_vllm_fa3_C::fwd", "_vllm_fa3_C::get_scheduler_metadata"},
}
"""By library: some of the operators that each must register."""
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
_seconds: dict[str, float] = {}


@pytest.fixture(scope="module", autouse=True)
def figures() -> Iterator[None]:
    """Seconds of each part, in runs/soak."""
    yield
    record("gpu_pack", {"seconds": _seconds})


def _run(what: str, *command: str | Path, **options: Any) -> str:
    """Run a command, show how long it took, and return its output; all of it is shown if it fails."""
    began = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    _seconds[what] = time.monotonic() - began
    print(f"gpu-pack: {what}, {_seconds[what]:.0f} s", flush=True)
    if ended.returncode:
        pytest.fail(f"{what} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
    return ended.stdout


@pytest.fixture(scope="module")
def python(figures: None) -> Path:
    """Python of an environment with what the GPU machine has, and nothing else."""
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    stamp = ENVIRONMENT / ".installed"
    found = ENVIRONMENT / "bin/python3"
    if stamp.exists() and stamp.read_text() == wanted:
        return found
    if shutil.disk_usage(ROOT).free < DISK:
        pytest.skip(f"an environment with torch for CUDA needs {DISK >> 30} GiB on disk")
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    installing: list[tuple[str | Path, ...]] = [
        (UV, "venv", "--quiet", "--python", _python_3_12(), ENVIRONMENT),
        (UV, "pip", "install", "--quiet", "--no-deps", "--python", found, "--requirement", REQUIREMENTS),
    ]
    began = time.monotonic()
    for command in installing:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            pytest.skip(f"Python 3.12 or torch 2.11 for CUDA cannot be had here: {ended.stderr[-1000:]}")
    _seconds["environment"] = time.monotonic() - began
    stamp.write_text(wanted)
    return found


def _python_3_12() -> str:
    """Return a Python 3.12 of pyenv, which uv does not look for, or what uv finds or downloads."""
    versions = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    return next((str(path) for path in sorted(versions.glob("3.12.*/bin/python3.12"))), "3.12")


@pytest.fixture(scope="module")
def there(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the pack and nothing else, as the machine gets it."""
    folder = tmp_path_factory.mktemp("there")
    _run("build", ROOT / "scripts/gpu-pack", "--out", folder / ".pack")
    yield folder
    # pytest keeps folders of three runs; this one has 400 MB.
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def listing(there: Path) -> Listing:
    """What the pack says of itself."""
    return read(there / ".pack")


@pytest.fixture(scope="module")
def variables(python: Path, there: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a process on the machine: nothing of this one's but where programs are."""
    stubs = tmp_path_factory.mktemp("stubs")
    for source, name in (("cuda.c", "libcuda.so.1"), ("nvml.c", "libnvidia-ml.so.1")):
        _run(name, "gcc", "-shared", "-fPIC", "-o", stubs / name, PRETENDED / source)
    return {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "HOME": str(there.parent / "home"),
        "PACK_HOME": str(there / "unpacked"),
        "LD_LIBRARY_PATH": str(stubs),
        # torch asks NVML whether there is a device; else it would ask the driver, which cannot be pretended so far.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


def _there(what: str, program: str, folder: Path, variables: dict[str, str]) -> Any:
    """Run a program on the machine, in a shell that has sourced the pack; return the JSON of its last line."""
    script = f". .pack/start.sh && python3 {program}"
    said = _run(what, "sh", "-euc", script, cwd=folder, env=variables, timeout=900)
    return json.loads(said.splitlines()[-1])


def test_it_weighs_little_and_has_what_is_needed(there: Path, listing: Listing) -> None:
    weight = sum(each.stat().st_size for each in (there / ".pack").iterdir())
    assert listing.weight <= weight <= LIMIT
    # Not everything was dropped either: some 7 MB of vLLM's kernels, some 8 MB of FlashAttention.
    kept = {each.target: each.code.kept for each in listing.libraries}
    assert kept["vllm/_C_stable_libtorch.abi3.so"] > 5e6
    assert kept["vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"] > 5e6
    assert set(kept) == set(OPERATORS)


def test_every_compiled_library_loads_and_registers_its_operators(
    there: Path, listing: Listing, variables: dict[str, str]
) -> None:
    site = Path(variables["PACK_HOME"]) / f"site-{listing.keys['site']}"
    found = _there("libraries", f"{PRETENDED / 'load_libraries.py'} {site}", there, variables)
    assert {path: each["error"] for path, each in found.items() if "error" in each} == {}
    assert len(found) > 20
    for path, operators in OPERATORS.items():
        assert operators <= set(found[path]["operators"])


def test_what_decides_about_drafts_can_be_imported(there: Path, variables: dict[str, str]) -> None:
    # A replay builds it as an instance does. Nothing of it is imported before, so a gap would show on the GPU.
    program = '-c "import vllm, services.generation.build, services.generation.speculation.planner; print(1)"'
    assert _there("drafts", program, there, variables) == 1


@pytest.mark.parametrize(("kind", "graphs", "dtype"), ENGINES)
def test_nothing_stops_an_engine_before_the_device(
    kind: EngineKind, graphs: Graphs, dtype: str, there: Path, variables: dict[str, str], tmp_path: Path
) -> None:
    program = f"{PRETENDED / 'start_engine.py'} {kind.name} {graphs} {dtype} {tmp_path}"
    said = _there(f"{kind}, {graphs} graphs, {dtype}", program, there, variables)
    assert (said["platform"], said["capability"]) == ("NvmlCudaPlatform", [9, 0])
    assert said["error"] == "RuntimeError"
    assert said["message"].startswith("Found no NVIDIA driver on your system.")
    assert said["where"][-3:] == [
        "gpu_worker.py:init_device",
        "__init__.py:set_device_index",
        "__init__.py:_lazy_init",
    ]
