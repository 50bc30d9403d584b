"""The chart, run: what it renders is played by a cluster of processes, and loses parts in the middle of steps."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from cryptography import x509

from tests.e2e.chart_release import POOL, ChartRelease, Step, values
from tests.support.cluster import kernel
from tests.support.cluster.launcher import ROOT

DOCUMENTED = (ROOT / "docs/operations.md").read_text()

# Names the places that take a connection. A relay closes those that are refused; others are not answered.
REACHED = """import socket, sys
from concurrent.futures import ThreadPoolExecutor

def reached(place):
    host, _, port = place.partition(":")
    try:
        with socket.create_connection((f"{host}.ml.svc.cluster.local", int(port)), timeout=3) as to:
            to.settimeout(1)
            try:
                return bool(to.recv(1))
            except TimeoutError:
                # It waits for the caller to begin.
                return True
    except OSError:
        return False

places = sys.argv[1:]
with ThreadPoolExecutor(len(places)) as threads:
    print(*[place for place, answers in zip(places, threads.map(reached, places)) if answers])
"""

pytestmark = pytest.mark.skipif(bool(kernel.lacks()), reason=kernel.lacks())


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChartRelease]:
    release = ChartRelease(tmp_path_factory.mktemp("chart"))
    with release.cluster:
        release.install(values())
        release.wait_up(120)
        yield release


@pytest.fixture(scope="module")
def quiet(release: ChartRelease) -> str:
    """The tokens of a step that nothing disturbs."""
    checksum, instances = Step(release, "quiet").result()
    assert instances == [f"{POOL}-0", f"{POOL}-1"]
    return checksum


def test_the_documented_first_step_and_helm_test(release: ChartRelease) -> None:
    cluster = release.cluster
    (program,) = re.findall(r"```python\n(# first_step.py\n.*?)```", DOCUMENTED, re.DOTALL)
    status = cluster.execute("trainer", "python", "-", script=program).wait(60)
    said = cluster.log("trainer", "exec")
    assert status == 0, said
    assert said.splitlines()[:2] == [f"{POOL}-0 serving", f"{POOL}-1 serving"]
    assert len(re.findall(r"^p\d \d completed \d+$", said, re.MULTILINE)) == 32

    cluster.apply(release.hooks)
    (hook,) = [each["metadata"]["name"] for each in release.hooks]
    cluster.wait(
        lambda: hook in cluster.pods and cluster.pod(hook).phase in ("Succeeded", "Failed"), 60, "helm test"
    )
    assert cluster.pod(hook).phase == "Succeeded", cluster.log(hook, "health")
    assert [name for name, (_, each) in cluster.pods.items() if each.restarts] == []


def test_nothing_is_reached_that_network_policies_do_not_let_through(release: ChartRelease) -> None:
    instance = f"{POOL}-0.paceline-generation"
    places = ["gateway:7400", "redis:6379", "bubbles:7420", "policy:7430", "reallocator:7440"]
    places = [f"paceline-{each}" for each in places] + ["paceline-drafts-0.paceline-drafts:7410"]
    places += [f"{instance}:{port}" for port in (7500, 7510, 9400)]
    (reallocator,) = release.cluster.of("Deployment", "paceline-reallocator")
    for pod, expected in (
        ("trainer", ["paceline-gateway:7400", f"{instance}:7500"]),
        (reallocator.pod.name, ["paceline-redis:6379", f"{instance}:7500"]),
    ):
        assert release.cluster.execute(pod, "python", "-", *places, script=REACHED).wait(60) == 0
        assert release.cluster.log(pod, "exec").split() == expected


def test_weights_are_pushed_to_volumes_of_the_instances(release: ChartRelease) -> None:
    before, _ = Step(release, "before", 40).result()
    assert release.push() == ["1", f"{POOL}-0", f"{POOL}-1"]
    assert release.adopted() == {f"{POOL}-{number}": ["v00000001"] for number in range(2)}
    assert Step(release, "after", 40).result()[0] != before


def test_certificates_are_renewed_in_mid_step(release: ChartRelease, quiet: str) -> None:
    cluster = release.cluster
    step = Step(release, "renewed").begun()
    for kind, name in list(cluster.objects):
        if kind == "Certificate" and name != "paceline-ca":
            cluster.renew(name)
    # It reads its own when it starts.
    cluster.restart("paceline-redis")
    assert not step.ended
    assert step.result()[0] == quiet
    release.wait_up(60)

    shown = """import os, ssl, socket, sys
ca, cert, key = (
    os.environ.get(f"PACELINE_TLS__{name}_FILE", f"/tls/{file}")
    for name, file in (("CA", "ca.crt"), ("CERT", "tls.crt"), ("KEY", "tls.key"))
)
context = ssl.create_default_context(cafile=ca)
context.load_cert_chain(cert, key)
plain = socket.create_connection((sys.argv[1], int(sys.argv[2])))
with context.wrap_socket(plain, server_hostname=sys.argv[1]) as it:
    print(ssl.DER_cert_to_PEM_cert(it.getpeercert(binary_form=True)))
"""
    (reallocator,) = cluster.of("Deployment", "paceline-reallocator")
    for secret, caller, host, port in (
        ("paceline-gateway-tls", "trainer", "paceline-gateway", 7400),
        ("paceline-redis-tls", reallocator.pod.name, "paceline-redis", 6379),
        ("paceline-generation-tls", "trainer", f"{POOL}-0.paceline-generation", 7500),
    ):
        new = x509.load_pem_x509_certificate(cluster.secrets[secret]["tls.crt"]).serial_number
        deadline = time.monotonic() + 30
        while True:
            name = f"{host}.ml.svc.cluster.local"
            status = cluster.execute(caller, "python", "-", name, str(port), script=shown).wait(30)
            said = cluster.log(caller, "exec")
            assert status == 0, said
            if x509.load_pem_x509_certificate(said.encode()).serial_number == new:
                break
            assert time.monotonic() < deadline, f"{host} shows its former certificate"


def test_the_node_of_the_leading_gateway_is_lost_in_mid_step(release: ChartRelease, quiet: str) -> None:
    cluster = release.cluster
    (leader,) = [each for each in cluster.of("Deployment", "paceline-gateway") if each.ready]
    (instance,) = [each for each in cluster.of("StatefulSet", POOL) if each.node == leader.node]
    step = Step(release, "lost").begun()
    cluster.lose(leader.node)
    assert not step.ended
    assert step.result()[0] == quiet
    # Deployments are back by themselves, and what belongs to StatefulSets waits for a word.
    assert leader.pod.name not in cluster.pods
    assert cluster.pod(instance.pod.name) is instance
    cluster.take_out_of_service(leader.node)
    release.wait_up(60)
    assert leader.node not in {each.node for _, each in cluster.pods.values() if not each.gone.is_set()}
    assert Step(release, "afterwards").result() == (quiet, [f"{POOL}-0", f"{POOL}-1"])
    # The instance that came back has the pushed weights from the other, and nothing else had them.
    assert release.adopted() == {f"{POOL}-{number}": ["v00000001"] for number in range(2)}


def test_an_instance_leaves_in_mid_step(release: ChartRelease, quiet: str) -> None:
    cluster = release.cluster
    (leaving,) = [each for each in cluster.of("StatefulSet", POOL) if each.pod.name.endswith("-1")]
    step = Step(release, "scaled").begun()
    cluster.scale(POOL, 1)
    assert not step.ended
    checksum, instances = step.result()
    assert checksum == quiet
    assert instances == [f"{POOL}-0", f"{POOL}-1"]
    assert leaving.gone.wait(leaving.pod.grace)
    assert not leaving.overran
