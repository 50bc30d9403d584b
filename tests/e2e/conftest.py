"""One platform for the tests of most files: two instances of a tiny random model, a gateway, a Redis.

It is lent to one file after another, each of which finds it as it was started. With PACELINE_E2E_TLS=1 in the
environment of pytest everything runs under mutual TLS and a token.
"""

from __future__ import annotations

import os
import ssl
import urllib.request
from collections.abc import Generator, Iterator
from pathlib import Path

import httpx
import pytest

from paceline import Client, Tls
from services.local import Platform, PlatformConfig
from tests.e2e.lent_platform import LentPlatform
from tests.support.certificates import Authority
from tests.support.ports import free_port

VOCAB = 64
# Taken away, because services refuse settings that they do not know.
UNDER_TLS = os.environ.pop("PACELINE_E2E_TLS", "") not in ("", "0")


def make_model(folder: Path, seed: int = 0) -> Path:
    """Return a random Qwen3 whose distributions are wide, so that equal tokens mean equal computation."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def certificates(folder: Path) -> Tls:
    """Return an authority, and a certificate that all processes and the client use, on both ends."""
    tls = Authority(folder, "ours").tls("platform")
    return Tls(tls.ca_file, tls.cert_file, tls.key_file)


def scrape(platform: Platform, metrics_address: str) -> str:
    """What a process of the platform tells Prometheus."""
    config, scheme, context = platform.config, "http", None
    if config.tls is not None:
        scheme, context = "https", ssl.create_default_context(cafile=str(config.tls.ca_file))
        context.load_cert_chain(str(config.tls.cert_file), str(config.tls.key_file))
    headers = {"Authorization": f"Bearer {config.token}"} if config.token else {}
    request = urllib.request.Request(f"{scheme}://{metrics_address}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=60, context=context) as answer:
        return str(answer.read().decode())


def http_client(platform: Platform) -> httpx.Client:
    """Return a client of the facade, to be closed."""
    config = platform.config
    context: ssl.SSLContext | bool = True
    if config.tls is not None:
        context = ssl.create_default_context(cafile=str(config.tls.ca_file))
        context.load_cert_chain(str(config.tls.cert_file), str(config.tls.key_file))
    headers = {"Authorization": f"Bearer {config.token}"} if config.token else {}
    return httpx.Client(base_url=platform.http_address, headers=headers, verify=context, timeout=120)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def plain_config(model: Path, folder: Path) -> PlatformConfig:
    """Return that of a platform of which every part is there but the learner."""
    engine = ("--dtype=float32", "--max-num-seqs=32", "--kv-cache-memory-bytes=268435456")
    return PlatformConfig(
        model=model,
        instances=2,
        folder=folder / "platform",
        pin=False,  # the kernel shares the cores out among the workers
        # Short samples are reported and journaled before they end, as long ones are by default.
        instance_options=(*engine, "--checkpoint-seconds=0.2"),
        gateway_options=("--journal-tokens=1",),
        # A gateway that starts anew needs the port that it had.
        port=free_port(),
        http_port=0,
        # Time to hand over samples on a busy machine.
        stop_timeout=60.0,
        tls=certificates(folder) if UNDER_TLS else None,
        token="the token of the tests" if UNDER_TLS else None,
    )


_LENT = LentPlatform()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that borrow the platform come last, one after the other."""
    borrowing = {item.path for item in items if _borrows(item)}
    items.sort(key=lambda item: item.path in borrowing)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Stop the lent platform when the next test, if there is any, does not borrow it."""
    try:
        return (yield)
    finally:
        if nextitem is None or not _borrows(nextitem):
            _LENT.stop()


def _borrows(item: pytest.Item) -> bool:
    return "lent_platform" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="module")
def lent_platform(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Lend the platform to a file."""

    def config() -> PlatformConfig:
        return plain_config(model, tmp_path_factory.mktemp("lent"))

    with _LENT.lend(config) as platform:
        yield platform


@pytest.fixture(scope="module")
def platform(lent_platform: Platform) -> Platform:
    return lent_platform


@pytest.fixture
def client(platform: Platform) -> Iterator[Client]:
    with platform.client() as client:
        yield client
