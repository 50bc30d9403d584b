"""Sources of settings, their precedence, and errors about invalid ones."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name

import pytest
from pydantic import Field

from helm.generate import SETTINGS
from paceline.transport.channel import is_loopback
from services.platform.config import ServiceConfig, listening_problems, load_config


class ToyConfig(ServiceConfig):
    """A service with one setting of its own."""

    max_batch: int = Field(default=8, ge=1)
    """Most samples at once."""


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("PACELINE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text("port: 1\nmax_batch: 10\nnamespace: from-file\n")
    return path


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output for a configuration that must be refused with status 2."""
    with pytest.raises(SystemExit) as ended:
        load_config(ToyConfig, argv)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    return printed.err


def test_defaults_are_loopback_and_free_ports() -> None:
    config = load_config(ToyConfig, [])
    assert (config.host, config.port, config.metrics_port) == ("127.0.0.1", 0, 0)
    assert (config.token, config.tls, config.insecure) == (None, None, False)
    assert config.max_message_bytes == 16 * 1024 * 1024
    assert config.max_batch == 8


def test_flags_win_over_environment_over_file_over_defaults(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_PORT", "2")
    monkeypatch.setenv("PACELINE_MAX_BATCH", "20")
    config = load_config(ToyConfig, ["--config", str(file), "--port", "3"])
    assert config.port == 3
    assert config.max_batch == 20
    assert config.namespace == "from-file"
    assert config.log_level == "info"


def test_nested_settings_merge_over_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cert", "key", "ca"):
        (tmp_path / name).write_text("")
    (tmp_path / "settings.yaml").write_text(f"tls: {{key_file: {tmp_path}/key, cert_file: nowhere}}")
    monkeypatch.setenv("PACELINE_TLS__CA_FILE", f"{tmp_path}/ca")
    config = load_config(
        ToyConfig, ["--config", str(tmp_path / "settings.yaml"), "--tls.cert-file", f"{tmp_path}/cert"]
    )
    assert config.tls is not None
    assert config.tls.cert_file == tmp_path / "cert"
    assert config.tls.key_file == tmp_path / "key"
    assert config.tls.ca_file == tmp_path / "ca"


@pytest.mark.parametrize("flags", [["--insecure"], ["--insecure", "--port", "4"]])
def test_a_switch_needs_no_value(flags: list[str]) -> None:
    assert load_config(ToyConfig, flags).insecure


def test_unknown_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--colour" in refusal(["--colour", "red"], capsys)


def test_abbreviated_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--max-bat" in refusal(["--max-bat", "3"], capsys)


def test_unknown_environment_variable_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_COLOUR", "red")
    text = refusal([], capsys)
    assert "PACELINE_COLOUR" in text
    assert "ToyConfig" in text


def test_unknown_nested_environment_variable_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TLS__COLOUR", "red")
    assert "tls.colour: no such setting" in refusal([], capsys)


def test_unknown_key_in_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("colour: red")
    text = refusal(["--config", str(path)], capsys)
    assert "colour: no such setting of ToyConfig" in text
    assert str(path) in text


def test_service_links_of_kubernetes_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_GATEWAY_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("PACELINE_GATEWAY_SERVICE_PORT_GRPC", "7400")
    monkeypatch.setenv("PACELINE_GATEWAY_PORT_7400_TCP_ADDR", "10.0.0.1")
    assert load_config(ToyConfig, []).port == 0


def test_every_bad_field_is_named_with_its_value_and_source(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_MAX_BATCH", "0")
    text = refusal(["--port", "70000", "--log-level", "loud"], capsys)
    lines = {line.split(":")[0].strip(): line for line in text.splitlines()[1:]}
    assert "65535" in lines["port"]
    assert "'70000'" in lines["port"]
    assert "flags" in lines["port"]
    assert "'warning'" in lines["log_level"]
    assert "environment" in lines["max_batch"]


@pytest.mark.parametrize(
    ("content", "said"),
    [("- 1\n- 2\n", "settings by name"), ("a: [", "line 1, column 5"), ("port: {a: 1}", "port: ")],
)
def test_unreadable_file_is_refused(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(content)
    assert said in refusal(["--config", str(path)], capsys)


def test_missing_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such file" in refusal(["--config", "/nowhere/at-all.yaml"], capsys)


def test_token_is_read_from_its_file_and_never_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "token"
    path.write_text("s3cret\n")
    config = load_config(ToyConfig, ["--token-file", str(path)])
    assert config.token is not None
    assert config.token.get_secret_value() == "s3cret"
    assert "s3cret" not in repr(config)
    assert "s3cret" not in refusal(["--token-file", str(path), "--port", "x"], capsys)
    assert "s3cret" not in refusal(["--token", "s3cret", "--redis-url", "x"], capsys)


@pytest.mark.parametrize("token", ["", "  \n"])
def test_empty_token_is_refused(token: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "token"
    path.write_text(token)
    assert "token" in refusal(["--token-file", str(path)], capsys)


def test_empty_token_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "must not be empty" in refusal(["--token", ""], capsys)


def test_half_a_key_pair_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cert").write_text("")
    assert "must be set together" in refusal(["--tls.cert-file", str(tmp_path / "cert")], capsys)


def test_client_authentication_needs_an_authority(capsys: pytest.CaptureFixture[str]) -> None:
    assert "ca_file" in refusal(["--tls.client-auth"], capsys)


@pytest.mark.parametrize("url", ["localhost:6379", "http://localhost"])
def test_unknown_store_address_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "redis_url" in refusal(["--redis-url", url], capsys)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "localhost", "::1", "[::1]"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    assert listening_problems(ToyConfig(host=host)) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gateway.example", ""])
def test_beyond_loopback_needs_tls_and_token(host: str) -> None:
    assert not is_loopback(host)
    (problem,) = listening_problems(ToyConfig(host=host))
    assert "tls and token" in problem
    (problem,) = listening_problems(ToyConfig(host=host, token="t"))
    assert "needs tls;" in problem
    assert listening_problems(ToyConfig(host=host, insecure=True)) == []


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_config(ToyConfig, ["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name in ("--config", "--max-batch", "--tls.cert-file", "Most samples at once"):
        assert name in text


@pytest.mark.parametrize("place", sorted(set(SETTINGS.values()) - {"services.policy.config:ScalingConfig"}))
def test_a_service_with_a_port_of_its_own_keeps_the_range_of_ports(place: str) -> None:
    schema = resolve_name(place).model_json_schema()["properties"]["port"]
    assert (schema["minimum"], schema["maximum"]) == (0, 65535)
