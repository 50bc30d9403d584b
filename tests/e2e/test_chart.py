"""The chart, run: what it renders is played by a cluster of processes, and loses parts in the middle of steps."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator

import pytest
from cryptography import x509

from tests.e2e.chart_release import POOL, ChartRelease, Step, values
from tests.e2e.chart_step import PROMPTS, SAMPLES
from tests.support.cluster import kernel
from tests.support.cluster.kubelet import Kubelet
from tests.support.cluster.launcher import ROOT

DOCUMENTED = (ROOT / "docs/operations.md").read_text()

# Says of each place if it answers a TLS handshake, if a relay resets the connection, or if one's own kernel allows
# none. An alert is an answer, too.
TRIED = """import socket, ssl, sys
from concurrent.futures import ThreadPoolExecutor

context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

def tried(place):
    host, _, port = place.partition(":")
    try:
        with socket.create_connection((f"{host}.ml.svc.cluster.local", int(port)), timeout=45) as plain:
            context.wrap_socket(plain).close()
    except TimeoutError:
        return "silent"
    except PermissionError:
        return "forbidden"
    except (ConnectionError, ssl.SSLEOFError):
        return "reset"
    except ssl.SSLError:
        return "answers"
    return "answers"

places = sys.argv[1:]
with ThreadPoolExecutor(len(places)) as threads:
    for place, result in zip(places, threads.map(tried, places)):
        print(place, result, flush=True)
"""

# Who is connected to Redis, and what it has denied its users since it started, asked as the default user.
DENIED = """import os, re, sys
from redis import Redis

url = re.sub("//[^@]*@", f"//default:{sys.argv[1]}@", os.environ["PACELINE_REDIS_URL"])
with Redis.from_url(url) as client:
    users = {each["user"] for each in client.client_list()}
    print(*sorted(users - {"default"}))
    for each in client.acl_log():
        print({name: each[name] for name in ("reason", "object", "username")})
"""

pytestmark = [
    pytest.mark.skipif(bool(kernel.lacks()), reason=kernel.lacks()),
    # The first test waits until the release is up.
    pytest.mark.timeout(420),
]


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChartRelease]:
    release = ChartRelease(tmp_path_factory.mktemp("chart"))
    with release.cluster:
        release.install(values())
        release.wait_up()
        yield release


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
    cluster, instance, drafts = release.cluster, f"{POOL}-0", "paceline-drafts-0"
    ports = ("gateway:7400", "redis:6379", "bubbles:7420", "policy:7430", "reallocator:7440")
    services = [f"paceline-{each}" for each in ports]
    pods = [(drafts, f"{drafts}.paceline-drafts:7410")]
    pods += [(instance, f"{instance}.paceline-generation:{port}") for port in (7500, 7510, 9400)]
    served = f"{instance}.paceline-generation:7500"
    (reallocator,) = cluster.of("Deployment", "paceline-reallocator")
    for caller, expected in (
        ("trainer", {"paceline-gateway:7400", served}),
        (reallocator.pod.name, {"paceline-redis:6379", served}),
    ):
        # Relays reset what they refuse. Pods do not answer, which their kernels count.
        trying = cluster.execute(caller, "python", "-", *services, served, script=TRIED)
        assert trying.wait(60) == 0, cluster.log(caller, "exec")
        found = dict(line.split() for line in cluster.log(caller, "exec").splitlines())
        assert found == {each: "answers" if each in expected else "reset" for each in [*services, served]}
        for pod, place in pods:
            if place not in expected:
                refused = _connection_is_refused(release, caller, pod, place)
                assert refused, f"{caller} reaches {place}"


def _connection_is_refused(release: ChartRelease, caller: str, pod: str, place: str) -> bool:
    cluster = release.cluster
    before = cluster.network.unanswered(pod)
    connecting = cluster.execute(caller, "python", "-", place, script=TRIED)
    try:
        cluster.wait(
            lambda: cluster.network.unanswered(pod) > before or connecting.poll() is not None,
            60,
            f"{place} answers, or its pod refuses to",
        )
        return connecting.poll() is None or cluster.log(caller, "exec").split() == [place, "forbidden"]
    finally:
        connecting.kill()
        connecting.wait()


def _assert_nothing_is_denied(release: ChartRelease) -> None:
    cluster = release.cluster
    password = cluster.secrets["paceline-redis"]["password"].decode()
    (reallocator,) = cluster.of("Deployment", "paceline-reallocator")
    asked = cluster.execute(reallocator.pod.name, "python", "-", password, script=DENIED)
    assert asked.wait(60) == 0, cluster.log(reallocator.pod.name, "exec")
    users, *denied = cluster.log(reallocator.pod.name, "exec").splitlines()
    assert denied == []
    assert set(users.split()) >= {"bubbles", "drafts", "gateway", "generation", "policy", "reallocator"}


def test_weights_are_pushed_to_volumes_of_the_instances(release: ChartRelease) -> None:
    before, _ = Step(release, "before", 40).result()
    assert release.push() == ["1", f"{POOL}-0", f"{POOL}-1"]
    assert release.adopted() == {f"{POOL}-{number}": ["v00000001"] for number in range(2)}
    assert Step(release, "after", 40).result()[0] != before


def test_certificates_are_renewed_in_mid_step(release: ChartRelease) -> None:
    cluster = release.cluster
    step = Step(release, "renewed", seed=10).begun()
    for kind, name in list(cluster.objects):
        if kind == "Certificate" and name != "paceline-ca":
            cluster.renew(name)
    _assert_nothing_is_denied(release)
    # It reads its own when it starts.
    cluster.restart("paceline-redis")
    assert not step.ended
    renewed, _ = step.result()
    release.wait_up()
    assert Step(release, "with-new-certificates", seed=10).result()[0] == renewed

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
            status = cluster.execute(caller, "python", "-", name, str(port), script=shown).wait(60)
            said = cluster.log(caller, "exec")
            assert status == 0, said
            if x509.load_pem_x509_certificate(said.encode()).serial_number == new:
                break
            assert time.monotonic() < deadline, f"{host} shows its former certificate"


def test_every_gateway_is_ready_and_answers(release: ChartRelease) -> None:
    """The standby by the leader, to which the policies and certificates of the chart let it through.

    They are asked by the documented command, at addresses that are not in their certificate.
    """
    (line,) = re.findall(r"^paceline (status (?:.*\\\n)*.*)\n```", DOCUMENTED, re.MULTILINE)
    command = shlex.split(line.replace("\\\n", "").replace("trainer-tls/", "/tls/"))
    gateways = release.cluster.of("Deployment", "paceline-gateway")
    assert [each.ready for each in gateways] == [True, True]
    assert release.leader() in gateways
    for each in gateways:
        given = [word.replace("localhost", each.address) for word in command]
        asked = release.cluster.execute("trainer", "python", "-m", "paceline", *given)
        status, said = asked.wait(60), release.cluster.log("trainer", "exec")
        assert status == 0, said
        assert {f"{POOL}-0", f"{POOL}-1"} <= set(said.split()), said


def test_gateways_that_do_not_start_are_no_outage(release: ChartRelease) -> None:
    cluster = release.cluster
    before = {each.pod.name: each for each in cluster.of("Deployment", "paceline-gateway")}
    wrong = values()
    wrong["gateway"]["extraEnv"] = [{"name": "PACELINE_NO_SUCH_SETTING", "value": "1"}]
    release.install(wrong)

    def others() -> list[Kubelet]:
        found = cluster.of("Deployment", "paceline-gateway")
        return [each for each in found if each.pod.name not in before]

    cluster.wait(lambda: any(each.restarts for each in others()), 60, "the new gateway was started again")
    assert len(others()) == 1
    assert not others()[0].ready
    assert all(each.ready and not each.ending.is_set() for each in before.values())
    assert Step(release, "wrong", seed=6).result()[1] == [f"{POOL}-0", f"{POOL}-1"]
    release.install(values())
    release.wait_up()
    assert {each.pod.name for each in cluster.of("Deployment", "paceline-gateway")} == set(before)


def test_the_node_of_the_leading_gateway_is_lost_in_mid_step(release: ChartRelease) -> None:
    cluster = release.cluster
    leader = release.leader()
    (instance,) = [each for each in cluster.of("StatefulSet", POOL) if each.node == leader.node]
    step = Step(release, "lost", seed=8).begun()
    cluster.lose(leader.node)
    assert not step.ended
    # What arrives from now on comes from the other gateway.
    assert step.arrived < PROMPTS * SAMPLES
    lost, _ = step.result()
    assert step.arrived == PROMPTS * SAMPLES
    # Deployments are back by themselves, and what belongs to StatefulSets waits for a word.
    assert leader.pod.name not in cluster.pods
    assert cluster.pod(instance.pod.name) is instance
    cluster.take_out_of_service(leader.node)
    release.wait_up()
    assert leader.node not in {each.node for _, each in cluster.pods.values() if not each.gone.is_set()}
    assert Step(release, "afterwards", seed=8).result() == (lost, [f"{POOL}-0", f"{POOL}-1"])
    # The instance that came back has the pushed weights from the other, and nothing else had them.
    assert release.adopted() == {f"{POOL}-{number}": ["v00000001"] for number in range(2)}


def test_an_instance_leaves_in_mid_step(release: ChartRelease) -> None:
    cluster = release.cluster
    (leaving,) = [each for each in cluster.of("StatefulSet", POOL) if each.pod.name.endswith("-1")]
    step = Step(release, "scaled", seed=9).begun()
    cluster.scale(POOL, 1)
    assert not step.ended
    checksum, instances = step.result()
    assert instances == [f"{POOL}-0", f"{POOL}-1"]
    assert leaving.gone.wait(leaving.pod.grace)
    assert not leaving.overran
    assert Step(release, "alone", seed=9).result() == (checksum, [f"{POOL}-0"])
    _assert_nothing_is_denied(release)
