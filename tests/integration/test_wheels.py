"""The installed packages, outside the checkout: what they install, and that they run beside packages of others."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from paceline.errors import how_to_install
from tests.support.wheels import ROOT, SOURCES, Environment, build_wheels, uv

pytestmark = pytest.mark.skipif(uv() is None, reason="uv is not here; `make setup` gets it")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMANDS = sorted(PROJECT["entry-points"]["paceline.commands"])
OWN = ("drafter", "policy", "report", "status", "token")
TRANSFORMERS = """
import transformers
from transformers.utils.import_utils import is_kernels_available
transformers.LlamaForCausalLM
print(is_kernels_available())
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build_wheels(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def server(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment of SDK and server, in which another package `kernels` was installed first."""
    made = Environment(tmp_path_factory.mktemp("server"))
    _install_other_kernels(made.packages)
    made.install(*wheels.values())
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a user who has folders of the same names; importing them fails."""
    for name in ("services", "kernels", "examples"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('this is the folder of a user')\n")
    return tmp_path


def _install_other_kernels(packages: Path) -> None:
    """Install what has the structure of Hugging Face's `kernels`; the real one is in the long test."""
    (packages / "kernels/layer").mkdir(parents=True)
    (packages / "kernels/__init__.py").write_text(
        "from kernels.layer import Mode, get_kernel\n__version__ = '9'\n"
    )
    (packages / "kernels/layer/__init__.py").write_text("from .mode import Mode\nget_kernel = print\n")
    (packages / "kernels/layer/mode.py").write_text("class Mode: ...\n")
    described = packages / "kernels-9.0.dist-info/METADATA"
    described.parent.mkdir()
    described.write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 9.0\n")


def test_a_wheel_installs_one_name_which_is_ours(wheels: dict[str, Path]) -> None:
    for source, name in SOURCES.items():
        entries = zipfile.ZipFile(wheels[source]).namelist()
        tops = {entry.partition("/")[0] for entry in entries}
        (described,) = [top for top in tops if top.endswith(".dist-info")]
        assert tops == {name, described}


def test_the_server_s_wheel_has_every_file_of_its_folders(wheels: dict[str, Path]) -> None:
    entries = set(zipfile.ZipFile(wheels["deploy/server"]).namelist())
    files = [file for name in ("services", "kernels") for file in (ROOT / name).rglob("*.*")]
    wanted = {
        f"paceline_server/{file.relative_to(ROOT)}"
        for file in files
        if file.suffix in (".py", ".json", ".yaml") and "__pycache__" not in file.parts
    }
    assert len(wanted) > 300
    assert wanted <= entries


RUN_ALL = """
import subprocess, sys
from importlib.metadata import entry_points
from paceline.cli import main
statuses = {each.name: main([each.name, "--help"]) for each in entry_points(group="paceline.commands")}
child = subprocess.run([sys.executable, "-m", "services.platform.grpc.health", "--help"], stdout=subprocess.DEVNULL)
import kernels.jit
from kernels import backend, get_kernel
from kernels.layer.mode import Mode
assert kernels.Mode is Mode and not hasattr(kernels, "absent")
print("answers", sorted(statuses.items()), child.returncode, kernels.__version__, kernels.__file__)
"""


def test_commands_and_their_processes_run_in_a_folder_that_has_the_same_names(
    server: Environment, folder: Path
) -> None:
    done = server.run("python", "-P", "-c", RUN_ALL, cwd=folder)
    ours = server.packages / "paceline_server/kernels/__init__.py"
    statuses = [(name, 0) for name in COMMANDS]
    assert f"answers {statuses} 0 9 {ours}" in done.stdout, done.stderr
    assert "the demo needs" not in done.stdout
    done = server.run("python", "-P", "-m", "paceline_server", cwd=folder)
    assert done.stdout.strip() == str(server.packages / "paceline_server")


def test_whoever_runs_no_server_gets_the_other_package(server: Environment, folder: Path) -> None:
    code = "import kernels, paceline, sys; print(kernels.__file__, 'services' in sys.modules)"
    done = server.run("python", "-P", "-c", code, cwd=folder)
    assert done.stdout.split() == [str(server.packages / "kernels/__init__.py"), "False"], done.stderr


def test_the_sdk_alone_says_how_to_install_the_rest(wheels: dict[str, Path], folder: Path) -> None:
    alone = Environment(folder / "alone")
    alone.install(wheels["."])
    done = alone.run("paceline", "--help", cwd=folder)
    lines = [line.split() for line in done.stdout.splitlines()]
    missing = sorted(line[0] for line in lines if line[1:3] == ["Not", "available:"])
    assert missing == COMMANDS, done.stderr
    assert {name for name in OWN if [name] in [line[:1] for line in lines]} == set(OWN)
    calls = [[name, "--steps=2"] for name in COMMANDS]
    code = f"from paceline.cli import main; print([main(each) for each in {calls}])"
    done = alone.run("python", "-P", "-c", code, cwd=folder)
    assert done.stdout.split() == str([2] * len(COMMANDS)).split(), done.stderr
    for name, said in zip(COMMANDS, done.stderr.splitlines(), strict=True):
        server = f"the server: {how_to_install('cpu', server=True)}"
        needed = "`make setup` in a checkout" if name == "demo" else server
        assert said.startswith(f"paceline: {name} needs {needed}")


def test_set_up_makes_an_environment_that_type_checkers_and_commands_can_follow(folder: Path) -> None:
    # Site-packages may have other lines than paths, which run code: an import hook is none that mypy knows.
    packages = Path(sysconfig.get_path("purelib"))
    lines = [file.read_text().strip() for file in packages.glob("__editable__*paceline*")]
    assert lines == [str(ROOT)], "run `make setup`"
    code = "import examples.tinymath.command as demo; print(demo.__file__)"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.stdout.strip() == str(ROOT / "examples/tinymath/command.py"), done.stderr


USER = """
import paceline
from typing import assert_type
with paceline.Client("127.0.0.1:7400") as client, client.run("r", seed=1) as run:
    for sample in run.rollout(0, [paceline.Group("p", [1, 2], samples=2)]):
        assert_type(sample, paceline.Sample)
paceline.SamplingParams(max_token=4)
"""


@pytest.mark.soak
def test_a_strict_type_checker_knows_the_types_outside_the_checkout(
    server: Environment, folder: Path
) -> None:
    (folder / "user.py").write_text(USER)
    for python in (sys.executable, str(server.folder / "bin/python")):
        command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "user.py"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert 'Unexpected keyword argument "max_token"' in done.stdout, done.stdout + done.stderr
        assert "Found 1 error" in done.stdout


@pytest.mark.soak
@pytest.mark.parametrize("name", [*OWN, *COMMANDS])
def test_every_command_of_the_checkout_s_environment_has_help_elsewhere(name: str, folder: Path) -> None:
    program = Path(sys.executable).parent / "paceline"
    done = subprocess.run([program, name, "--help"], cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: paceline {name}" in done.stdout.replace("Usage", "usage")


@pytest.mark.soak
@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_transformers_and_the_server_import_beside_the_kernels_of_hugging_face(
    first: str, wheels: dict[str, Path], folder: Path
) -> None:
    made = Environment(folder / "both")
    online = ("--no-deps",)
    needed = ["kernels>=0.17,<0.18", "tomlkit"]
    installs = [lambda: made.install(*needed, options=online), lambda: made.install(*wheels.values())]
    for install in installs if first == "theirs" else reversed(installs):
        install()
    trainer = made.run("python", "-P", "-c", f"import paceline, trl{TRANSFORMERS}", cwd=folder)
    assert trainer.stdout.strip() == "True", trainer.stderr
    both = f"import paceline_server, kernels.jit{TRANSFORMERS}from kernels import get_kernel"
    process = made.run("python", "-P", "-c", both, cwd=folder)
    assert process.stdout.strip() == "True", process.stderr
    environment = {"PYTHONPATH": str(ROOT)}
    checkout = made.run(
        "python", "-c", f"import kernels.jit{TRANSFORMERS}", cwd=ROOT, environment=environment
    )
    assert checkout.stdout.strip() == "True", checkout.stderr
