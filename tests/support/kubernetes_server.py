"""A real Kubernetes API server, where one can be had.

`KUBEBUILDER_ASSETS` names a folder with `etcd` and `kube-apiserver`, as controller-runtime's setup-envtest makes
it; `TEST_KUBERNETES_URL` is the address of a running one that asks for no credentials, as `kubectl proxy` gives.
With the former there are controllers only where a test asks for them, and only if `kube-controller-manager` lies in
the folder, too. There is never a scheduler or a kubelet: pods are made, and none runs.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from services.platform.launching import tied
from tests.support.certificates import Authority
from tests.support.ports import free_port

_START_SECONDS = 60.0
_MANAGER = "kube-controller-manager"
_CONTROLLERS = (
    "deployment-controller",
    "garbage-collector-controller",
    "namespace-controller",
    "replicaset-controller",
    "resourcequota-controller",
    "statefulset-controller",
)
"""Those that the chart's own objects need."""


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Where it is, who has signed its certificate, and a token that may do everything ("": none is needed)."""

    url: str
    ca_file: Path | None = None
    token: str = ""

    def call(self, method: str, path: str, body: object = None) -> requests.Response:
        """Return a call that has to succeed."""
        verify = True if self.ca_file is None else str(self.ca_file)
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        answer = requests.request(
            method, self.url + path, json=body, headers=headers, verify=verify, timeout=60
        )
        if not answer.ok:
            raise requests.HTTPError(f"{method} {path}: {answer.text}", response=answer)
        return answer

    def write_config(self, path: Path) -> None:
        """Write what kubectl and Helm read as KUBECONFIG."""
        authority = {} if self.ca_file is None else {"certificate-authority": str(self.ca_file)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.url, **authority}}],
            "users": [{"name": "u", "user": {"token": self.token} if self.token else {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "c",
        }
        path.write_text(json.dumps(config))


def is_available() -> bool:
    """Whether `api_server` can be used."""
    return bool(os.environ.get("KUBEBUILDER_ASSETS") or os.environ.get("TEST_KUBERNETES_URL"))


def has_controllers() -> bool:
    """Whether a server of our own can have controllers."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    return assets is not None and (Path(assets) / _MANAGER).exists()


@contextmanager
def api_server(folder: Path, *, controllers: bool = False) -> Iterator[ApiServer]:
    """The one at TEST_KUBERNETES_URL, or one of our own that ends with the context.

    One of our own lets whoever shows nothing do everything, as `kubectl proxy` does. With `controllers` it has
    some, if `has_controllers`. RuntimeError with its last lines if one of its processes ends before it is ready.
    """
    if url := os.environ.get("TEST_KUBERNETES_URL"):
        yield ApiServer(url.rstrip("/"))
        return
    assets = Path(os.environ["KUBEBUILDER_ASSETS"])
    peers, clients, api = free_port(), free_port(), free_port()
    tls = Authority(folder, "cluster").tls("apiserver")
    private, public = _service_account_keys(folder)
    token = secrets.token_urlsafe(32)
    tokens = folder / "tokens.csv"
    tokens.write_text(f'{token},admin,admin,"system:masters"\n')
    with ExitStack() as stack:
        etcd = f"http://127.0.0.1:{clients}"
        flags = [
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
        ]
        peer = f"--listen-peer-urls=http://127.0.0.1:{peers}"
        processes = [stack.enter_context(_running([str(assets / "etcd"), *flags, peer], folder))]
        flags = [
            f"--etcd-servers={etcd}",
            f"--secure-port={api}",
            "--bind-address=127.0.0.1",
            f"--tls-cert-file={tls.cert_file}",
            f"--tls-private-key-file={tls.key_file}",
            f"--cert-dir={folder}",
            "--service-account-issuer=https://localhost",
            f"--service-account-key-file={public}",
            f"--service-account-signing-key-file={private}",
            "--service-cluster-ip-range=10.0.0.0/24",
            # With AlwaysAllow the server refuses everybody who shows nothing.
            "--authorization-mode=RBAC",
            f"--token-auth-file={tokens}",
            "--disable-admission-plugins=ServiceAccount",
        ]
        processes.append(stack.enter_context(_running([str(assets / "kube-apiserver"), *flags], folder)))
        server = ApiServer(f"https://127.0.0.1:{api}", tls.ca_file, token)
        _wait_ready(server, processes)
        server.call("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", _everybody())
        if controllers and has_controllers():
            server.write_config(folder / "controllers.config")
            flags = [
                f"--kubeconfig={folder / 'controllers.config'}",
                f"--service-account-private-key-file={private}",
                f"--controllers={','.join(_CONTROLLERS)}",
                "--leader-elect=false",
                "--secure-port=0",
            ]
            stack.enter_context(_running([str(assets / _MANAGER), *flags], folder))
        yield server


def _service_account_keys(folder: Path) -> tuple[Path, Path]:
    """Write the keys that sign and verify tokens of service accounts; the server reads no PKCS#8 of an EC key."""
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = folder / "accounts.key", folder / "accounts.pub"
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )
    format_ = serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, format_))
    return private, public


def _everybody() -> dict[str, object]:
    api = "rbac.authorization.k8s.io"
    return {
        "metadata": {"name": "everybody"},
        "roleRef": {"apiGroup": api, "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"apiGroup": api, "kind": "Group", "name": "system:unauthenticated"}],
    }


@dataclass(frozen=True, slots=True)
class _Process:
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """RuntimeError if it has ended."""
        if (status := self.process.poll()) is not None:
            said = self.log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{self.log.stem} has ended with status {status}: {said}")


@contextmanager
def _running(command: list[str], folder: Path) -> Iterator[_Process]:
    log = folder / f"{Path(command[0]).name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            tied(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield _Process(process, log)
    finally:
        process.terminate()
        process.wait(60)


def _wait_ready(server: ApiServer, processes: list[_Process]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            server.call("GET", "/readyz")
        except requests.RequestException:
            for each in processes:
                each.check()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)  # between two looks, not for anything to have happened
        else:
            return
