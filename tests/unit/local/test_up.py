"""Options of `paceline up` as the platform's configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.local import PlatformConfig, up
from services.local.launch import Specs
from services.models.local_model import hub_name


def _configured(monkeypatch: pytest.MonkeyPatch, folder: Path, *flags: str) -> PlatformConfig:
    seen: list[PlatformConfig] = []

    def run(config: PlatformConfig) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr(up, "run_until_stopped", run)
    ended = CliRunner().invoke(up.app, ["--model", str(folder), "--port=0", *flags])
    assert ended.exit_code == 0, ended.output
    return seen[0]


@pytest.mark.parametrize("chosen", ["pregenerate", "halt", "sleep"])
def test_what_instances_do_during_an_update_reaches_the_coordinator(
    chosen: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = _configured(
        monkeypatch, tmp_path, "--during-update", chosen, "--", "--max-num-seqs", "64", "--no-sleep-mode"
    )
    specs = Specs(config, tmp_path, "redis://127.0.0.1:1/0")
    assert f"--during-update={chosen}" in config.bubble_options
    flags = specs.instance(0, {}, ()).argv
    assert ("--sleep-mode" in flags) is (chosen == "sleep")
    # What is given for instances has the last word.
    assert flags[-3:] == ("--max-num-seqs", "64", "--no-sleep-mode")


def test_instances_pregenerate_during_an_update_if_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert _configured(monkeypatch, tmp_path).bubble_options == ("--during-update=pregenerate",)


def test_a_model_over_http_has_its_name_on_the_hub_or_the_one_that_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert _configured(monkeypatch, tmp_path).served_model_name is None
    given = _configured(monkeypatch, tmp_path, "--http-port", "0", "--served-model-name", "org/m")
    assert given.served_model_name == "org/m"
    monkeypatch.setattr(up, "local_model", lambda *_: tmp_path)
    assert _configured(monkeypatch, Path("org/m@main")).served_model_name == "org/m"
    ended = CliRunner().invoke(up.app, ["--model", str(tmp_path), "--served-model-name", "m"])
    assert ended.exit_code == 2
    assert "--http-port" in ended.output


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("org/m", "org/m"),
        ("org/m@v1", "org/m"),
        ("hf://org/m", "org/m"),
        ("s3://b/m", None),
        ("nonsense", None),
    ],
)
def test_only_a_name_on_the_hub_is_one(given: str, name: str | None) -> None:
    assert hub_name(given) == name


def test_a_folder_is_no_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org/m").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_name("org/m") is None
