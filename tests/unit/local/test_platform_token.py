"""The token that a platform asks for: one that is given, or a new one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from services.local import PlatformConfig, PlatformError
from services.local.launch import Specs
from services.local.platform import with_token


@pytest.fixture
def config(tmp_path: Path) -> PlatformConfig:
    return PlatformConfig(tmp_path / "model", folder=tmp_path / "runs")


def test_a_new_one_is_made_at_every_start(config: PlatformConfig) -> None:
    first, second = (with_token(config, {}).token for _ in range(2))
    assert first is not None
    assert first.startswith("pl_")
    assert first != second


def test_one_that_is_given_is_kept(config: PlatformConfig, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("pl_of_a_file\n")
    environment = {"PACELINE_TOKEN_FILE": str(tmp_path / "secret")}
    assert with_token(config, environment).token == "pl_of_a_file"
    environment["PACELINE_TOKEN"] = "pl_of_the_environment"
    assert with_token(config, environment).token == "pl_of_the_environment"
    assert with_token(replace(config, token="pl_given"), environment).token == "pl_given"


def test_its_own_file_is_not_taken_for_one_that_is_given(config: PlatformConfig) -> None:
    """Its clients are told to name it, and it is started again in the same shell."""
    config.folder.mkdir()
    environment = {"PACELINE_TOKEN_FILE": str(config.folder / "token")}
    (config.folder / "token").write_text("pl_of_the_last_one")
    assert with_token(config, environment).token != "pl_of_the_last_one"
    (config.folder / "token").unlink()
    assert with_token(config, environment).token is not None


def test_a_named_file_that_is_none_is_an_error(config: PlatformConfig, tmp_path: Path) -> None:
    with pytest.raises(PlatformError, match="cannot be read"):
        with_token(config, {"PACELINE_TOKEN_FILE": str(tmp_path / "absent")})


@pytest.mark.parametrize(
    ("given", "environment"),
    [("pl_given", {}), (None, {"PACELINE_TOKEN": "t"}), (None, {"PACELINE_TOKEN_FILE": "/f"})],
)
def test_none_and_one_at_once_is_an_error(
    given: str | None, environment: dict[str, str], config: PlatformConfig
) -> None:
    """Processes would take the one in their environment."""
    with pytest.raises(PlatformError, match=r"no_token: .* is given, too"):
        with_token(replace(config, no_token=True, token=given), environment)


def test_without_one_no_process_asks(config: PlatformConfig) -> None:
    alone = with_token(replace(config, no_token=True), {})
    assert alone.token is None
    assert "PACELINE_TOKEN" not in Specs(alone, Path("/state"), "redis://x").gateway(0).environment
