"""Options of `paceline up` as the platform's configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.local import PlatformConfig, up
from services.local.specs import Specs


def _configured(monkeypatch: pytest.MonkeyPatch, folder: Path, *flags: str) -> PlatformConfig:
    seen: list[PlatformConfig] = []

    def run(config: PlatformConfig) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr(up, "run_until_stopped", run)
    ended = CliRunner().invoke(up.app, ["--model", str(folder), *flags])
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
