"""Command lines of the processes."""

from dataclasses import replace
from pathlib import Path

from paceline import Tls
from services.local import launch
from services.local.config import PlatformConfig
from services.local.launch import Specs

CONFIG = PlatformConfig(model=Path("/m"), token="secret", instance_options=("--kv-cache-memory-bytes", "5"))
STATE = Path("/state")


def test_the_token_is_not_on_the_command_line() -> None:
    spec = Specs(CONFIG, STATE, "redis://x").gateway(7400)
    assert "secret" not in " ".join(spec.argv)
    assert spec.environment["PACELINE_TOKEN"] == "secret"


def test_an_instance_on_cpu_is_told_its_cores_and_its_memory() -> None:
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "1", "OMP_NUM_THREADS": "1"}
    spec = Specs(CONFIG, STATE, "redis://x").instance(1, environment, (1,))
    assert "--threads-bind=1" in spec.argv
    assert "--instance-id=instance-1" in spec.argv
    assert f"--kv-cache-memory-bytes={launch.CPU_KV_BYTES}" in spec.argv
    assert spec.argv[-2:] == CONFIG.instance_options, "given options come last, so they count"


def test_an_instance_on_a_gpu_takes_the_memory_that_is_there() -> None:
    spec = Specs(PlatformConfig(Path("/m")), STATE, "redis://x").instance(
        0, {"CUDA_VISIBLE_DEVICES": "0"}, ()
    )
    assert not any("kv-cache" in word or "threads-bind" in word for word in spec.argv)


def test_a_draft_store_keeps_its_snapshots_in_the_folder_of_the_platform() -> None:
    config = PlatformConfig(Path("/m"), folder=Path("/f"), draft_options=("--budget-bytes", "5"))
    spec = Specs(config, STATE, "redis://x").draft_store(1)
    assert spec.name == "drafts-1"
    assert "--replica-id=drafts-1" in spec.argv
    assert "--snapshot-dir=/f/drafts" in spec.argv
    assert "--redis-url=redis://x" in spec.argv
    assert "--port=0" in spec.argv, "several share the machine"
    assert spec.argv[-2:] == config.draft_options, "given options come last, so they count"


def test_a_facade_is_given_the_gateways_the_tokens_and_the_tokenizer(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    config = PlatformConfig(tmp_path, token="secret", tokens_file=tokens, facade_options=("--run-id", "r"))
    spec = Specs(config, STATE, "redis://x").facade(8000, "a:1,b:2")
    assert spec.argv[2] == "services.facade"
    assert {"--port=8000", "--gateway=a:1,b:2", f"--tokens-file={tokens}"} <= set(spec.argv)
    assert spec.environment["PACELINE_TOKEN"] == "secret"
    assert not any(word.startswith("--model") for word in spec.argv), "there is no tokenizer"
    assert not any(word.startswith("--served") for word in spec.argv), "it has the name that instances report"
    named = Specs(replace(config, served_model_name="org/m"), STATE, "redis://x").facade(8000, "a:1")
    assert "--served-model-name=org/m" in named.argv
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert f"--model={tmp_path}" in Specs(config, STATE, "redis://x").facade(8000, "a:1,b:2").argv


def test_every_process_is_given_the_token() -> None:
    for spec in (
        Specs(CONFIG, STATE, "redis://x").draft_store(0),
        Specs(CONFIG, STATE, "redis://x").service("bubbles", ()),
        Specs(CONFIG, STATE, "redis://x").service("reallocator", ()),
        Specs(CONFIG, STATE, "redis://x").learner(Path("/d")),
    ):
        assert "secret" not in " ".join(spec.argv)
        assert spec.environment["PACELINE_TOKEN"] == "secret"
        assert spec.cores == (), "light: they go wherever there is room"


def test_every_process_is_given_the_certificates_and_asks_for_them() -> None:
    tls = Tls(Path("/c/ca.crt"), Path("/c/tls.crt"), Path("/c/tls.key"), "paceline")
    config = PlatformConfig(Path("/m"), tls=tls, tokens_file=Path("/c/tokens.yaml"))
    gateway = Specs(config, STATE, "redis://x").gateway(0)
    for spec in (gateway, Specs(config, STATE, "redis://x").service("bubbles", ())):
        assert {name: value for name, value in spec.environment.items() if "TLS" in name} == {
            "PACELINE_TLS__CA_FILE": "/c/ca.crt",
            "PACELINE_TLS__CERT_FILE": "/c/tls.crt",
            "PACELINE_TLS__KEY_FILE": "/c/tls.key",
            "PACELINE_TLS__CLIENT_AUTH": "true",
            "PACELINE_TLS__SERVER_NAME": "paceline",
        }
    assert "--tokens-file=/c/tokens.yaml" in gateway.argv


def test_learner_and_instances_begin_with_the_same_head() -> None:
    config = PlatformConfig(Path("/m"), folder=Path("/f"), learner=True, learner_options=("--lr", "1"))
    head = Path("/f/drafter/first/drafter-000001")
    learner = Specs(config, STATE, "redis://x").learner(head)
    assert f"--checkpoint={head}" in learner.argv
    assert {"--model=/m", "--folder=/f/drafter", "--port=0"} <= set(learner.argv)
    assert learner.argv[-2:] == config.learner_options, "given options come last, so they count"
    instance = Specs(config, STATE, "redis://x").instance(0, {}, (), head)
    assert f"--eagle3={head}" in instance.argv
    assert not any("eagle3" in word for word in Specs(config, STATE, "redis://x").instance(0, {}, ()).argv)


def test_each_gateway_has_a_name_a_port_and_a_log_of_its_own() -> None:
    specs_ = Specs(CONFIG, STATE, "redis://x")
    first, second = specs_.gateway(7400), specs_.gateway(7401, 1)
    assert (first.name, second.name) == ("gateway", "gateway-1")
    assert "--port=7401" in second.argv
    assert first.log != second.log
    assert first.ready_file != second.ready_file
