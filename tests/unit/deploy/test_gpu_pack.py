"""The pack for GPU machines, of wheels that are made here: what goes in, what it weighs, and how it is unpacked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.gpu_pack import archive, build, contents, wheels
from deploy.gpu_pack.wheels import PackError, Pin
from tests.support.fatbins import CUBIN, Code, container, library

ROOT = Path(__file__).parents[3]
LIBRARY = library(container([Code(CUBIN, 80, b"o" * 64), Code(CUBIN, 90, b"n" * 32)]))


@pytest.fixture
def found(tmp_path: Path) -> list[Path]:
    """Two wheels, one of them with files that the pack leaves out."""
    vllm = {
        "vllm/__init__.py": b"version = 1",
        "vllm/_C.abi3.so": LIBRARY,
        "vllm/_qutlass_C.abi3.so": LIBRARY,
        "vllm/kernels/configs/device_name=NVIDIA_A100.json": b"{}",
        "vllm/kernels/configs/device_name=NVIDIA_H100.json": b"{}",
        "vllm-1.dist-info/METADATA": b"Name: vllm",
        "vllm-1.dist-info/RECORD": b"",
    }
    other = {"other-2.data/purelib/other.py": b"import vllm", "other-2.data/scripts/other": b"#!python"}
    return [
        _wheel(tmp_path / "vllm-1-py3-none-any.whl", vllm),
        _wheel(tmp_path / "other-2-py3-none-any.whl", other),
    ]


def _wheel(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as written:
        for name, content in files.items():
            written.writestr(name, content)
    return path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a file that is committed, one that is new, and one that git ignores."""
    root = tmp_path / "checkout"
    for name in ("kernels/old.py", "services/new.py", "paceline/ignored.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"name = {name!r}\n")
    (root / ".gitignore").write_text("ignored.py\n")
    subprocess.run(["git", "init", "--quiet", root], check=True)
    subprocess.run(["git", "-C", root, "add", "kernels"], check=True)
    return root


def test_a_pack_is_unpacked_where_it_is_brought(found: list[Path], checkout: Path, tmp_path: Path) -> None:
    listing = build.build(found, checkout, tmp_path / "there/.pack")
    assert listing.packages == ["vllm==1", "other==2"]
    (shrunk,) = listing.libraries
    assert (shrunk.target, shrunk.code.kept, shrunk.code.dropped) == ("vllm/_C.abi3.so", 32, 64)
    assert listing == build.read(tmp_path / "there/.pack")

    printed = _sourced(
        tmp_path / "there",
        "import other, sys, kernels.old, services.new, vllm; print(other.__file__, services.new.name)"
        "; print(vllm.version)",
    )
    home = tmp_path / "home"
    site = home / f"site-{listing.keys['site']}"
    assert printed == f"{site}/other.py services/new.py\n1\n"
    files = {str(each.relative_to(site)) for each in site.rglob("*") if each.is_file()}
    compiled = {path for path in files if path.endswith(".pyc")}
    assert {path.partition(".")[0] for path in compiled} == {"__pycache__/other", "vllm/__pycache__/__init__"}
    assert files - compiled == {
        "other.py",
        "vllm/__init__.py",
        "vllm/_C.abi3.so",
        "vllm/kernels/configs/device_name=NVIDIA_H100.json",
        "vllm-1.dist-info/METADATA",
    }
    assert len((site / "vllm/_C.abi3.so").read_bytes()) == len(LIBRARY)
    code = home / f"code-{listing.keys['code']}"
    assert sorted(each.name for each in code.rglob("*.py")) == ["new.py", "old.py"]


def test_in_a_checkout_the_code_is_the_checkouts_own(
    found: list[Path], checkout: Path, tmp_path: Path
) -> None:
    build.build(found, checkout, checkout / ".pack")
    # The edit is later than the pack.
    (checkout / "kernels/old.py").write_text("name = 'edited'\n")
    assert _sourced(checkout, "import kernels.old; print(kernels.old.name)") == "edited\n"
    assert not list((tmp_path / "home").glob("code-*"))


def _sourced(folder: Path, program: str) -> str:
    """Run a program in a folder as on the GPU machine: with a POSIX shell, and a Python that has nothing."""
    python = folder.parent / "bin/python3"
    python.parent.mkdir()
    python.symlink_to(Path(sys.executable).resolve())
    ended = subprocess.run(
        ["sh", "-euc", f". .pack/start.sh; python3 -c '{program}'"],
        cwd=folder,
        env={"PATH": f"{python.parent}:{os.environ['PATH']}", "PACK_HOME": str(folder.parent / "home")},
        capture_output=True,
        text=True,
        check=True,
    )
    return ended.stdout


def test_without_a_pack_the_script_says_so(tmp_path: Path) -> None:
    script = ROOT / "deploy/gpu_pack/carried/start.sh"
    ended = subprocess.run(
        ["sh", "-c", f". {script}"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode != 0
    assert f"there is no .pack in {tmp_path}" in ended.stderr


def test_what_is_up_to_date_is_left_as_it_is(found: list[Path], checkout: Path, tmp_path: Path) -> None:
    out = tmp_path / "pack"
    first = build.build(found, checkout, out)
    archives = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.glob("site-*")}
    (checkout / "kernels/old.py").write_text("edited = True\n")
    second = build.build(found, checkout, out)
    assert {path: path.stat().st_mtime_ns for path in out.glob("site-*")} == {
        path: time for path, (time, _) in archives.items()
    }
    assert second.keys["site"] == first.keys["site"]
    assert second.keys["code"] != first.keys["code"]

    # Half an archive is no archive, and what is built again is the same to the byte.
    path, (_, content) = next(iter(archives.items()))
    path.write_bytes(content[:-1])
    build.build(found, checkout, out)
    assert {path: path.read_bytes() for path in out.glob("site-*")} == {
        path: content for path, (_, content) in archives.items()
    }


def test_other_wheels_are_another_pack(found: list[Path], checkout: Path, tmp_path: Path) -> None:
    first = build.build(found, checkout, tmp_path / "pack")
    second = build.build(found[:1], checkout, tmp_path / "pack")
    assert second.packages == ["vllm==1"]
    assert second.keys["site"] != first.keys["site"]


def test_a_pack_over_the_limit_is_refused(
    found: list[Path], checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "LIMIT", 10)
    with pytest.raises(PackError, match=r"0\.0 MiB, 0 allowed\. Leave out more \(LEFT_OUT"):
        build.build(found, checkout, tmp_path / "pack")


def test_a_folder_without_code_is_refused(found: list[Path], tmp_path: Path) -> None:
    with pytest.raises(PackError, match="git lists no code of bench, kernels, paceline, services"):
        build.build(found, tmp_path / "nothing", tmp_path / "pack")


def test_a_library_without_code_for_the_gpu_is_refused() -> None:
    data = library(container([Code(CUBIN, 80, b"code")]))
    with pytest.raises(PackError, match=r"vllm/_C\.abi3\.so: no machine code for sm_90 would be left"):
        contents.shrunk("vllm/_C.abi3.so", data)
    # Others' libraries stay whole, whatever they have.
    assert contents.shrunk("other/_C.abi3.so", data) == (data, None)


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="c++filt is not there")
def test_of_flash_attention_the_kernels_of_the_models_served_stay() -> None:
    needed, other = b"_ZN5flash33prepare_varlen_num_blocks_kernelEv", b"_ZN5flash14forward_hdim64Ev"
    data = library(container([Code(CUBIN, 90, needed)]) + container([Code(CUBIN, 90, other)]))
    written, shrunk = contents.shrunk("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", data)
    assert shrunk is not None
    assert (shrunk.code.kept, shrunk.code.dropped) == (len(needed), len(other))
    assert needed in written
    assert other not in written


@given(st.lists(st.integers(0, 50)), st.integers(1, 5))
def test_archives_are_of_about_the_same_size(sizes: list[int], count: int) -> None:
    parts = archive.split(sizes, count, lambda each: each)
    assert [each for part in parts for each in part] == sizes
    assert len(parts) <= count
    assert all(parts)
    most = sum(sizes) / count + max(sizes, default=0)
    assert all(sum(part) <= most for part in parts)


def test_the_lock_has_a_wheel_for_each_package_and_versions_of_the_cuda_images() -> None:
    pins = wheels.read(ROOT / wheels.LOCK)
    versions = wheels.versions_of(ROOT / wheels.VERSIONS)
    # After scripts/lock: scripts/gpu-pack --lock.
    assert {pin.name: pin.version for pin in pins} == {pin.name: versions.get(pin.name) for pin in pins}
    assert all(pin.sha256 for pin in pins)
    assert [pin.name for pin in pins] == sorted({pin.name for pin in pins})
    machine = wheels.versions_of(ROOT / "requirements/gpu-machine.txt")
    assert not {pin.name for pin in pins} & set(machine)


@pytest.mark.parametrize("line", ["vllm>=1", "vllm==1 --hash=md5:0", "-r other.txt"])
def test_a_lock_has_pins_only(line: str, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(f"# comment\n{line}\n")
    with pytest.raises(PackError, match=f":2: .*{re.escape(line)}"):
        wheels.read(path)


def test_wheels_at_hand_are_not_downloaded_again(
    found: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "PIP", Path("/bin/false"))
    digest = wheels._digest(found[0])
    pin = Pin("vllm", "1", digest)
    assert wheels.collect([pin], tmp_path) == [found[0]]
    with pytest.raises(PackError, match="no wheel of absent"):
        wheels.collect([pin, Pin("absent", "1", "0" * 64)], tmp_path)
    with pytest.raises(PackError, match="no hash of vllm; run scripts/gpu-pack --lock"):
        wheels.collect([Pin("vllm")], tmp_path)


def test_relocking_takes_versions_as_given_and_hashes_as_found(
    found: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "PIP", Path("/bin/true"))
    text = wheels.relock([Pin("vllm", "0"), Pin("other")], {"vllm": "1", "other": "2"}, tmp_path)
    pins = [line for line in text.splitlines() if not line.startswith("#")]
    digests = [wheels._digest(path) for path in reversed(found)]
    assert pins == [f"other==2 --hash=sha256:{digests[0]}", f"vllm==1 --hash=sha256:{digests[1]}"]
    with pytest.raises(PackError, match="has no vllm"):
        wheels.relock([Pin("vllm")], {}, tmp_path)
