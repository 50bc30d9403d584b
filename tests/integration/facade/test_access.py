"""Tokens, scopes, rates and certificates of the facade, which are the gateway's."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from paceline.tokens import TokenScope, hash_token
from services.facade.app import FacadeProcess
from services.facade.config import FacadeConfig
from services.platform.config import ConfigError
from tests.integration.facade.conftest import StackMaker
from tests.integration.gateway.conftest import until
from tests.support.certificates import Authority

BODY = {"prompt": [1, 2], "max_tokens": 2}


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    """Tokens with one scope each, named as the scope is; that of `slow` may ask once."""
    entries: list[dict[str, Any]] = [
        {"name": scope, "sha256": hash_token(scope), "scopes": [scope]}
        for scope in ("rollouts", "weights", "fleet", "metrics")
    ]
    slow = {"name": "slow", "sha256": hash_token("slow"), "scopes": ["rollouts"]}
    entries.append({**slow, "requests_per_second": 0.001, "burst": 1})
    path = tmp_path / "tokens.yaml"
    path.write_text(yaml.safe_dump(entries))
    return path


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def test_a_request_needs_a_token_with_its_scope(stack_of: StackMaker, tokens_file: Path) -> None:
    http = (await stack_of(tokens_file=tokens_file)).facade.http
    missing = await http.post("/v1/completions", json=BODY)
    assert (missing.status_code, missing.headers["www-authenticate"]) == (401, "Bearer")
    assert missing.json()["error"]["type"] == "authentication_error"
    assert (await http.post("/v1/completions", json=BODY, headers=bearer("wrong"))).status_code == 401
    wrong = await http.post("/v1/completions", json=BODY, headers=bearer("weights"))
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (403, "MISSING_SCOPE")
    assert "rollouts" in wrong.json()["error"]["message"]
    assert (await http.post("/v1/completions", json=BODY, headers=bearer("rollouts"))).status_code == 200
    assert (await http.get("/v1/models", headers=bearer("weights"))).status_code == 200
    assert (await http.get("/v1/models", headers=bearer("metrics"))).status_code == 403
    for token, status in {"metrics": 200, "rollouts": 403, "wrong": 401}.items():
        assert (await http.get("/metrics", headers=bearer(token))).status_code == status
    for path in ("/health", "/livez", "/readyz", "/docs", "/openapi.json", "/version"):
        assert (await http.get(path)).status_code == 200
    # What no scope names is closed, whether or not it exists.
    assert (await http.get("/v2/nothing", headers=bearer("rollouts"))).status_code == 403


async def test_a_rate_is_kept(stack_of: StackMaker, tokens_file: Path) -> None:
    http = (await stack_of(tokens_file=tokens_file)).facade.http
    assert (await http.post("/v1/completions", json=BODY, headers=bearer("slow"))).status_code == 200
    limited = await http.post("/v1/completions", json=BODY, headers=bearer("slow"))
    assert limited.status_code == 429
    assert int(limited.headers["retry-after"]) > 100


async def test_callers_without_a_token_have_the_scopes_that_are_given_them(
    stack_of: StackMaker, tokens_file: Path
) -> None:
    scopes = frozenset({TokenScope.ROLLOUTS})
    stack = await stack_of(tokens_file=tokens_file, anonymous_scopes=scopes)
    assert (await stack.facade.http.post("/v1/completions", json=BODY)).status_code == 200
    # A token that is wrong is still an error.
    wrong = await stack.facade.http.post("/v1/completions", json=BODY, headers=bearer("wrong"))
    assert wrong.status_code == 401
    with pytest.raises(ValueError, match="insecure"):
        FacadeConfig(host="0.0.0.0", token="t", anonymous_scopes=scopes)
    with pytest.raises(ValueError, match="internal"):
        FacadeConfig(anonymous_scopes=frozenset({TokenScope.INTERNAL}))


async def test_certificates_are_taken_over_when_they_change(stack_of: StackMaker, tmp_path: Path) -> None:
    ours = Authority(tmp_path, "ours")
    tls = ours.tls("facade", client_auth=True)
    # The gateway of this test has no TLS: only the health of this process is asked for.
    context = ssl.create_default_context(cafile=str(tls.ca_file))
    context.load_cert_chain(str(tls.cert_file), str(tls.key_file))
    stack = await stack_of(tls=tls, http={"verify": context})
    assert (await stack.facade.http.get("/livez")).status_code == 200
    port = stack.facade.process.port

    async def shown() -> bytes:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return found

    before = await shown()
    ours.tls("facade", client_auth=True)

    async def replaced() -> bool:
        return await shown() != before

    await until(replaced, "the new certificate is shown")
    # Who shows no certificate is not let in.
    bare = ssl.create_default_context(cafile=str(tls.ca_file))
    async with httpx.AsyncClient(verify=bare) as stranger:
        with pytest.raises(httpx.HTTPError):
            await stranger.get(f"{stack.facade.url}/livez")


def test_it_does_not_listen_or_send_its_token_in_plain_text(registry: Any) -> None:
    with pytest.raises(ConfigError, match="needs tls and token"):
        FacadeProcess(FacadeConfig(host="0.0.0.0"), registry)
    with pytest.raises(ConfigError, match="plain text"):
        FacadeProcess(FacadeConfig(token="t", gateway="127.0.0.1:1,gateway:7400"), registry)
