"""Recipes can be parsed, and what they name of Paceline exists."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from trl import GRPOConfig

from paceline.integrations.verl import FleetSettings
from services.facade.access import METHODS, OPEN
from services.facade.config import FacadeConfig
from services.local import up

FOLDER = Path(__file__).parents[3] / "examples/recipes"
RECIPES = sorted(path for path in FOLDER.iterdir() if path.suffix in {".toml", ".sh", ".py"})
GATEWAY_PORT = "7400"
_PATH = re.compile(r"(?<![\w/.$~'*=-])/[a-z_]+(?:/[a-z0-9_]+)*\b(?![-/.])")
_FOLDERS = ("/root", "/shared", "/usr")


def commands(path: Path) -> Iterator[list[str]]:
    """Yield the commands of a recipe's head that start something of Paceline."""
    text = re.sub(r"^#", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    for line in text.splitlines():
        if line.strip().startswith(("paceline up", "python -m paceline_server")):
            yield shlex.split(line, comments=True)


def facade_port(command: list[str]) -> str | None:
    """Check a command, and return the port of the facade that it starts, if any."""
    if command[:2] == ["paceline", "up"]:
        parsed = typer.main.get_command(up.app).make_context("up", command[2:])
        port = parsed.params["http_port"]
        return None if port is None else str(port)
    assert command[:4] == ["python", "-m", "paceline_server", "services.facade"]
    flags = dict(zip(command[4::2], command[5::2], strict=True))
    names = {name.removeprefix("--").replace("-", "_") for name in flags}
    assert names <= FacadeConfig.model_fields.keys()
    return flags["--port"]


def test_there_is_one_for_each_trainer_and_the_page_lists_it() -> None:
    rows = re.findall(r"^\| `([\w.-]+)`", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == [path.name for path in RECIPES]
    assert len(rows) == 6


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_a_recipe_can_be_parsed_and_what_it_names_exists(recipe: Path) -> None:
    text = recipe.read_text()
    if recipe.suffix == ".toml":
        tomllib.loads(text)
    elif recipe.suffix == ".sh":
        subprocess.run(["bash", "-n", recipe], check=True)
    else:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline"):
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, each.name) for each in node.names)
    started = [facade_port(command) for command in commands(recipe)]
    assert started, "it says what to start"
    ports = set(re.findall(r"(?:localhost|127\.0\.0\.1):(\d+)", text))
    assert ports <= {GATEWAY_PORT, *(port for port in started if port is not None)}
    assert ports
    paths = {path for path in _PATH.findall(text) if not path.startswith(_FOLDERS)}
    assert paths <= {*METHODS, *OPEN}
    assert all(word in text for word in ("Not run: ", "Run: ")), "it says what was run"


def test_prime_rls_settings_lead_to_the_facade() -> None:
    settings = tomllib.loads((FOLDER / "prime-rl.toml").read_text())
    client = settings["orchestrator"]["model"]["client"]
    assert client["base_url"].endswith("/v1")
    assert client["api_key_var"] == "PACELINE_TOKEN"
    assert "inference" not in settings
    assert settings["weight_broadcast"] == {"type": "filesystem"}


def test_verls_settings_are_those_of_the_integration() -> None:
    text = (FOLDER / "verl.sh").read_text()
    given = set(re.findall(r"rollout\.engine_kwargs\.paceline\.(\w+)=", text))
    assert given == {"address", "run_id"}
    assert given <= {each.name for each in dataclasses.fields(FleetSettings)}


def test_trls_arguments_are_those_of_its_configuration() -> None:
    tree = ast.parse((FOLDER / "grpo_trl.py").read_text())
    (given,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "ARGUMENTS"
    ]
    assert set(given) <= inspect.signature(GRPOConfig).parameters.keys()
    assert given["per_device_train_batch_size"] % given["num_generations"] == 0
