"""A real Kubernetes API server, where one can be had.

`KUBEBUILDER_ASSETS` names a folder with `etcd` and `kube-apiserver`, as controller-runtime's setup-envtest makes
it; `TEST_KUBERNETES_URL` is the address of a running one that asks for no credentials, as `kubectl proxy` gives.
There are no controllers behind the former, so that nothing but the API itself is relied on.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests

from services.platform.lifeline import tied
from tests.support.certificates import Authority
from tests.support.ports import free_port

_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Where it is, and who has signed its certificate."""

    url: str
    ca_file: Path | None = None

    def call(self, method: str, path: str, body: object = None) -> requests.Response:
        """Return a call that has to succeed."""
        verify = True if self.ca_file is None else str(self.ca_file)
        answer = requests.request(method, self.url + path, json=body, verify=verify, timeout=60)
        answer.raise_for_status()
        return answer


def is_available() -> bool:
    """Whether `api_server` can be used."""
    return bool(os.environ.get("KUBEBUILDER_ASSETS") or os.environ.get("TEST_KUBERNETES_URL"))


@contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """The one at TEST_KUBERNETES_URL, or one of our own that ends with the context."""
    if url := os.environ.get("TEST_KUBERNETES_URL"):
        yield ApiServer(url.rstrip("/"))
        return
    assets = Path(os.environ["KUBEBUILDER_ASSETS"])
    peers, clients, api = free_port(), free_port(), free_port()
    tls = Authority(folder, "cluster").tls("apiserver")
    with ExitStack() as stack:
        etcd = f"http://127.0.0.1:{clients}"
        flags = [
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
        ]
        stack.enter_context(
            _running([str(assets / "etcd"), *flags, f"--listen-peer-urls=http://127.0.0.1:{peers}"])
        )
        flags = [
            f"--etcd-servers={etcd}",
            f"--secure-port={api}",
            "--bind-address=127.0.0.1",
            f"--tls-cert-file={tls.cert_file}",
            f"--tls-private-key-file={tls.key_file}",
            f"--cert-dir={folder}",
            "--service-account-issuer=https://localhost",
            f"--service-account-key-file={tls.key_file}",
            f"--service-account-signing-key-file={tls.key_file}",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--authorization-mode=AlwaysAllow",
            "--disable-admission-plugins=ServiceAccount",
        ]
        stack.enter_context(_running([str(assets / "kube-apiserver"), *flags]))
        server = ApiServer(f"https://127.0.0.1:{api}", tls.ca_file)
        _wait_ready(server)
        yield server


@contextmanager
def _running(command: list[str]) -> Iterator[None]:
    process = subprocess.Popen(tied(command), stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def _wait_ready(server: ApiServer) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            server.call("GET", "/readyz")
        except requests.RequestException:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return
