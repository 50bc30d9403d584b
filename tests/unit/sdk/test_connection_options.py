"""How a command finds its gateway: by options, by the environment, by a profile; and the errors for wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import certifi
import pytest

from paceline.cli import options
from paceline.cli.app import run
from paceline.cli.options import CONFIG
from paceline.transport.channel import Tls
from paceline.transport.options import TOKEN

CLOSED = "--address=127.0.0.1:1"
"""A port at which nothing listens."""
PROFILES = """
[profiles.production]
address = "gateway.example.com:7400"
ca_file = "production/ca.crt"
server_name = "paceline-gateway"
token_file = "production/token"

[profiles.near]
address = "10.0.0.7:7400"
insecure = true

[profiles.mistyped]
adress = "10.0.0.7:7400"

[profiles.number]
address = 7400

[profiles.tokenless]
token_file = "nowhere"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with profiles, and an environment that says nothing else."""
    for name in ("ADDRESS", "CA_FILE", "CERT_FILE", "KEY_FILE", "SERVER_NAME", "PROFILE"):
        monkeypatch.delenv(f"PACELINE_{name}", raising=False)
    (tmp_path / "production").mkdir()
    (tmp_path / "production/token").write_text("pl_of_the_profile\n")
    (tmp_path / "config.toml").write_text(PROFILES)
    monkeypatch.setenv(CONFIG, str(tmp_path / "config.toml"))
    return tmp_path


@pytest.fixture
def made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments of the client of the last command, which stops there."""
    found: dict[str, Any] = {}

    def client(address: str, **given: Any) -> Any:
        found.clear()
        found.update(given, address=address)
        raise ValueError("no further")

    monkeypatch.setattr(options, "Client", client)
    return found


def test_without_any_it_is_the_gateway_of_this_machine(made: dict[str, Any]) -> None:
    assert run(["status"]) == 2
    assert (made["address"], made["tls"], made["token"], made["insecure"]) == (
        "127.0.0.1:7400",
        None,
        None,
        False,
    )


def test_a_profile_has_what_is_not_given(made: dict[str, Any], folder: Path, monkeypatch: Any) -> None:
    ca_file = folder / "production/ca.crt"
    run(["status", "--profile=production"])
    assert made["address"] == "gateway.example.com:7400"
    assert made["tls"] == Tls(ca_file, server_name="paceline-gateway")
    assert made["token"] == "pl_of_the_profile"
    run(["policy", "get", "--profile=near"])
    assert (made["address"], made["tls"], made["insecure"]) == ("10.0.0.7:7400", None, True)
    # The environment comes before the profile, and an option before both.
    monkeypatch.setenv("PACELINE_PROFILE", "production")
    monkeypatch.setenv("PACELINE_ADDRESS", "other.example.com:7400")
    run(["weights", "abort", "--token=mine", "--server-name=name"])
    assert made["address"] == "other.example.com:7400"
    assert made["tls"] == Tls(ca_file, server_name="name")
    assert made["token"] == "mine"
    run(["drain", "i1", "--address=third.example.com:7400"])
    assert made["address"] == "third.example.com:7400"


def test_the_environment_has_all_of_mutual_tls(made: dict[str, Any], monkeypatch: Any) -> None:
    for name in ("CA_FILE", "CERT_FILE", "KEY_FILE"):
        monkeypatch.setenv(f"PACELINE_{name}", f"{name}.pem")
    run(["drafter", "show"])
    assert made["tls"] == Tls(Path("CA_FILE.pem"), Path("CERT_FILE.pem"), Path("KEY_FILE.pem"))


WRONG: list[tuple[list[str], str]] = [
    ([], "Usage"),
    (["nosuch"], "No such command 'nosuch'"),
    (["--nosuch"], "No such option"),
    (["status", "--nosuch"], "No such option"),
    (["status", "surplus"], "unexpected extra argument"),
    (["status", "--address="], "--address"),
    (["status", "--address=host:port"], "--address"),
    (["status", "--address=127.0.0.1:99999"], "--address"),
    (["status", "--address=a b:7400"], "--address"),
    (["status", "--address=10.0.0.7:7400", "--token=t"], "--ca-file"),
    (["status", CLOSED], "UNAVAILABLE"),
    (["status", CLOSED, "--watch"], "UNAVAILABLE"),
    (["status", "--profile=nosuch"], "profiles are 'production'"),
    (["status", "--profile=mistyped"], "'adress' is not an option"),
    (["status", "--profile=number"], "must be text"),
    (["status", "--profile=tokenless"], "cannot be read"),
    (["status", CLOSED, "--ca-file=nope.pem"], "nope.pem"),
    (["status", CLOSED, "--ca-file=."], "."),
    (["status", CLOSED, "--ca-file=config.toml"], "config.toml"),
    (["status", CLOSED, "--cert-file=nope.pem", "--key-file=nope.pem"], "nope.pem"),
    (["status", CLOSED, "--cert-file=config.toml"], "without key_file"),
    (["status", CLOSED, "--key-file=config.toml"], "without cert_file"),
    (["status", CLOSED, "--cert-file=config.toml", "--key-file=config.toml"], "no certificate in PEM"),
    (["status", CLOSED, "--cert-file=config.toml", "--key-file=nope.pem"], "nope.pem"),
    (["batches", CLOSED], "UNAVAILABLE"),
    (["cancel", CLOSED], "Missing argument 'RUN'"),
    (["cancel", CLOSED, "run"], "Missing argument 'BATCH'"),
    (["cancel", CLOSED, "run", "batch"], "UNAVAILABLE"),
    (["end-run", CLOSED], "Missing argument 'RUN'"),
    (["end-run", CLOSED, "run"], "UNAVAILABLE"),
    (["pause", CLOSED], "UNAVAILABLE"),
    (["resume", CLOSED, "i1"], "UNAVAILABLE"),
    (["drain", CLOSED], "Missing argument"),
    (["drain", CLOSED, "i1", "i2"], "unexpected extra argument"),
    (["policy"], "Usage"),
    (["policy", "nosuch"], "No such command"),
    (["policy", "set", CLOSED], "Missing argument"),
    (["policy", "set", CLOSED, "mode=toggle"], "UNAVAILABLE"),
    (["policy", "watch", CLOSED, "--last=-1"], "--last"),
    (["policy", "watch", CLOSED, "--last=soon"], "--last"),
    (["drafter", "roll-back", CLOSED, "--version=-1"], "--version"),
    (["weights", "abort", CLOSED], "UNAVAILABLE"),
    (["report", CLOSED], "UNAVAILABLE"),
    (["report", CLOSED, "--output=nowhere/x.html"], "there is no folder nowhere"),
    (["report", "--entries=nope"], "nope"),
    (["report", "--entries=."], "."),
    (["report", "--entries=config.toml"], "--entries"),
    (["report", "--entries=config.toml", "--live"], "--live"),
    (["report", CLOSED, "--live", "--port=99999"], "--port"),
    (["report", CLOSED, "--live", "--refresh=0"], "--refresh"),
    (["report", "--entries=empty", "--run=r"], "no step of 'r' has ended"),
    (["report", "--entries=empty", "--output=."], "."),
    (["token", "--scope=rollouts"], "Missing option '--name'"),
    (["token", "--name=x"], "Missing option '--scope'"),
    (["token", "--name=x", "--scope=all"], "scopes"),
    (["token", "--name=x", "--scope=fleet", "--requests-per-second=fast"], "--requests-per-second"),
    (["up"], "Missing option '--model'"),
    (["up", "--model=.", "--port=99999"], "--port"),
    (["up", "--model=.", "--http-port=-1"], "--http-port"),
    (["up", "--model=.", "--instances=0"], "--instances"),
    (["up", "--model=.", "--device=tpu"], "--device"),
    (["up", "--model=.", "--served-model-name=m"], "--served-model-name"),
    (["up", "--model=nope", "--port=0"], "'nope' is neither a folder"),
    (["up", "--model=empty", "--port=0"], "is a file"),
    (["doctor", "--device=tpu"], "--device"),
    (["doctor", "--port=99999"], "--port"),
    (["doctor", "--port=7399", "--http-port=7399"], "for HTTP"),
    (["doctor", "--model=nope", "--port=0"], "there is no folder nope"),
    (["doctor", "--model=production", "--port=0"], "production has no config.json"),
    (["doctor", "--port=0", "--redis-url=redis://:secret@127.0.0.1:1/0"], "connecting to 127.0.0.1:1"),
    (["up", "--model=.", "--port=0", "--redis-url=http://127.0.0.1"], "must start with one of redis://"),
    (["download"], "Missing option '--source'"),
    (["download", "--source=nope", "--folder=x"], "'nope' is neither a folder"),
    (["download", "--source=file:///nope", "--folder=x"], "file:///nope does not exist"),
    (["download", "--source=file:///nope", "--folder=empty"], "empty"),
    (
        ["simulate", "--device=H100"],
        "give one of '8B H100', '70B 8xH100', '30B-A3B H100', '8B H100, clock halved'",
    ),
    (["simulate", "--device=nope"], "names no device; give one of 'CPU tinymath'"),
    (["simulate", "--table=nope"], "nope"),
    (["simulate", "--draft=x"], "x"),
    (["calibrate"], "Missing option '--model'"),
]
ON_STDOUT = ("doctor", "up")
"""Commands that print a table of what is missing."""


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=[" ".join(each) or "nothing" for each, _ in WRONG])
def test_errors_take_a_line_or_two(
    arguments: list[str], said: str, folder: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv(TOKEN, raising=False)
    (folder / "empty").touch()
    assert run(arguments) in (1, 2)
    shown = capsys.readouterr()
    assert said in shown.err + (shown.out if said == "Usage" or arguments[0] in ON_STDOUT else "")
    assert "Traceback" not in shown.err


def test_an_error_is_raised_where_it_is_looked_for(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PACELINE_DEBUG", "1")
    monkeypatch.chdir(folder)
    with pytest.raises(OSError, match="No such file"):
        run(["status", CLOSED, "--ca-file=nope.pem"])


def test_authorities_may_have_comments_in_any_language(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.crt"
    bundle.write_text("# Főtanúsítvány\n" + Path(certifi.where()).read_text())
    Tls(bundle).credentials()
