"""The platform under mutual TLS and with tokens of different scopes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from safetensors.torch import load_file

import paceline
from paceline import (
    Client,
    Group,
    InstanceState,
    RetryPolicy,
    SamplingParams,
    Tls,
    WeightFolder,
    WeightStream,
)
from paceline.internal.v1 import generation_pb2, generation_pb2_grpc, weight_peer_pb2, weight_peer_pb2_grpc
from paceline.tokens import hash_token
from paceline.transport.channel import call_metadata, open_channel
from paceline.v1 import weight_stream_pb2, weight_stream_pb2_grpc
from services.local import Platform, PlatformConfig
from tests.support.certificates import DAY, Authority
from tests.support.zygote import launch

SAMPLING = SamplingParams(max_tokens=20, ignore_eos=True)
ONCE = RetryPolicy(seconds=0)
SCOPES = {"trainer": ["rollouts", "weights"], "operator": ["fleet"], "prometheus": ["metrics"]}


@dataclass(frozen=True, slots=True)
class Secured:
    """A platform, and what its callers may have."""

    platform: Platform
    authority: Authority
    tls: Tls

    def client(self, token: str | None = "trainer", *, tls: Tls | None = None, address: str = "") -> Client:
        """With the token of that name; tries once."""
        address = address or self.platform.gateway_address
        return Client(address, token=token, tls=tls or self.tls, retry=ONCE, timeout=60)


def shown(authority: Authority, subject: str, **settings: Any) -> Tls:
    """What a client shows with a certificate of that authority."""
    made = authority.tls(subject, **settings)
    return Tls(made.ca_file, made.cert_file, made.key_file)


@pytest.fixture(scope="module")
def secured(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    authority = Authority(folder, "ours")
    file = folder / "tokens.yaml"
    grants = [{"name": n, "sha256": hash_token(n), "scopes": scopes} for n, scopes in SCOPES.items()]
    file.write_text(yaml.safe_dump(grants))
    config = PlatformConfig(
        model=model,
        instances=2,
        folder=folder / "platform",
        pin=False,  # the kernel shares the cores out among the workers
        shared_weights=False,
        instance_options=("--dtype=float32", "--max-num-seqs=32", "--kv-cache-memory-bytes=268435456"),
        tls=shown(authority, "services"),
        token="the services' own",
        tokens_file=file,
    )
    with Platform(config, launch=launch) as platform:
        yield Secured(platform, authority, shown(authority, "trainer"))


def groups(count: int = 4) -> list[Group]:
    return [Group(f"p{n}", [3 + n, 4, 5], 2) for n in range(count)]


def test_a_training_step_under_mutual_tls(secured: Secured, model: Path, tmp_path: Path) -> None:
    state = load_file(model / "model.safetensors")
    with secured.client() as client:
        run = client.run("mtls", seed=3, weights=WeightFolder(tmp_path / "weights", model))
        first = list(run.rollout(0, groups(), SAMPLING))
        assert len(first) == 8
        assert run.push_weights({name: tensor * 1.3 for name, tensor in state.items()})
        second = list(run.rollout(1, groups(), SAMPLING))
        version = client.versions().policy_version
        assert {sample.version_spans[-1].policy_version for sample in second} == {version}
        assert version > first[0].version_spans[-1].policy_version


def address_of(secured: Secured, index: int) -> str:
    ready = secured.platform.instances[index].ready
    assert ready is not None
    return ready.address


def test_weights_are_pushed_and_passed_on_under_mutual_tls(
    secured: Secured, model: Path, tmp_path: Path
) -> None:
    state = load_file(model / "model.safetensors")
    new = {name: tensor * 1.3 for name, tensor in state.items()}
    with secured.client() as client:

        def sampled(run_id: str) -> dict[paceline.SampleKey, list[int]]:
            samples = list(client.run(run_id, seed=3).rollout(0, groups(16), SAMPLING))
            spans = [span for sample in samples for span in sample.provenance.instance_spans]
            assert {span.instance_id for span in spans} == {"instance-0", "instance-1"}
            return {sample.key: sample.token_ids.tolist() for sample in samples}

        by_folder = client.run("by-folder", weights=WeightFolder(tmp_path / "weights", model))
        # Several files, so that some are read while others come.
        by_stream = client.run("by-stream", weights=WeightStream(piece_bytes=16384, shard_bytes=100_000))
        by_folder.push_weights(new)
        wanted, checksum = sampled("wanted"), client.versions().policy_checksum
        by_folder.push_weights(state)
        assert sampled("before") != wanted

        finished = by_stream.push_weights(new)

        assert {each.instance_id: each.applied for each in finished.instances} == {
            "instance-0": True,
            "instance-1": True,
        }
        assert sampled("after") == wanted
        published = client.versions()
        assert (published.policy_version, published.policy_path) == (finished.policy_version, "")
        assert published.policy_checksum != checksum, "the files are others: the tensors are the same"
        # The trainer has sent the bytes to one of them, and the other has fetched them from there.
        place, adopted = f"v{finished.policy_version:08d}-*", secured.platform.config.adopted
        places = [list((adopted / f"instance-{n}").glob(place)) for n in range(2)]
        assert [len(each) for each in places] == [1, 1]
        first, second = ({path.name: path.read_bytes() for path in each.iterdir()} for (each,) in places)
        assert first == second
        assert len(first) > 3


def test_weights_of_a_trainer_without_a_certificate_are_not_taken(secured: Secured, model: Path) -> None:
    state = load_file(model / "model.safetensors")
    theirs = Authority(secured.authority.folder, "forger")
    forged = Tls(secured.tls.ca_file, theirs.tls("x").cert_file, theirs.tls("x").key_file)
    for tls in (Tls(secured.tls.ca_file), forged):
        with secured.client() as client:
            before = client.versions()
            run = client.run("bare", weights=WeightStream(give_up_seconds=0.0, tls=tls))
            with pytest.raises(paceline.UnavailableError):
                run.push_weights(state)
            assert client.versions().policy_version == before.policy_version
            # What was refused is in nobody's way.
            assert client.run("known", weights=WeightStream()).push_weights(state)


def test_weights_go_to_bearers_of_the_right_tokens_only(secured: Secured) -> None:
    """A trainer's token opens neither call of an instance, nor does a guessed ticket."""
    for index, token in ((0, "trainer"), (1, "guessed"), (1, None)):
        with open_channel(address_of(secured, index), secured.tls) as channel:
            push = weight_stream_pb2_grpc.WeightStreamServiceStub(channel).PushWeights
            fetch = weight_peer_pb2_grpc.WeightPeerServiceStub(channel).FetchWeights
            for call, request in (
                (push, weight_stream_pb2.PushWeightsRequest()),
                (fetch, weight_peer_pb2.FetchWeightsRequest()),
            ):
                with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                    list(call(iter([request]), timeout=60, metadata=call_metadata(token)))


def refused(secured: Secured, kind: type[paceline.PacelineError], **client: Any) -> paceline.PacelineError:
    with secured.client(**client) as caller, pytest.raises(kind) as caught:
        caller.versions()
    return caught.value


def test_without_a_token_nothing_is_answered(secured: Secured) -> None:
    for token in (None, "guessed", hash_token("trainer")):
        error = refused(secured, paceline.UnauthenticatedError, token=token)
        assert "a valid bearer token is needed" in error.message


def test_a_certificate_of_somebody_else_is_not_let_in(secured: Secured) -> None:
    theirs = Authority(secured.authority.folder, "theirs")
    wrong = Tls(secured.tls.ca_file, theirs.tls("x").cert_file, theirs.tls("x").key_file)
    assert "backends failing" in refused(secured, paceline.UnavailableError, tls=wrong).message
    bare = Tls(secured.tls.ca_file)
    assert "backends failing" in refused(secured, paceline.UnavailableError, tls=bare).message


def test_an_expired_certificate_is_not_let_in(secured: Secured) -> None:
    expired = shown(secured.authority, "former", lasts=-DAY)
    assert "backends failing" in refused(secured, paceline.UnavailableError, tls=expired).message


def test_a_gateway_of_somebody_else_is_not_believed(secured: Secured) -> None:
    theirs = shown(Authority(secured.authority.folder, "impostor"), "trainer")
    error = refused(secured, paceline.UnavailableError, tls=theirs)
    assert "CERTIFICATE_VERIFY_FAILED" in error.message


def test_a_trainer_cannot_drain_and_an_operator_cannot_sample(secured: Secured) -> None:
    with secured.client() as client, pytest.raises(paceline.PermissionDeniedError, match="scope fleet"):
        client.drain("instance-1")
    with (
        secured.client("operator") as client,
        pytest.raises(paceline.PermissionDeniedError, match="scope rollouts"),
    ):
        list(client.run("x", seed=1).rollout(0, groups(), SAMPLING))
    with (
        secured.client("prometheus") as client,
        pytest.raises(paceline.PermissionDeniedError, match="fleet or rollouts or weights"),
    ):
        client.instances()


def test_an_instance_does_not_know_the_callers_tokens(secured: Secured) -> None:
    with open_channel(address_of(secured, 0), secured.tls) as channel:
        status = generation_pb2_grpc.GenerationServiceStub(channel).GetStatus
        request = generation_pb2.GetStatusRequest()
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            status(request, timeout=60, metadata=call_metadata("trainer"))
        own = status(request, timeout=60, metadata=call_metadata("the services' own"))
        assert own.instance.instance_id == "instance-0"


def test_an_operator_drains_an_instance_in_the_middle_of_a_step_and_takes_it_back(secured: Secured) -> None:
    long = SamplingParams(max_tokens=300, ignore_eos=True)
    with secured.client() as client, secured.client("operator") as operator:
        quick = Group("quick", [3, 4], 1, SAMPLING)
        samples = iter(client.run("drained", seed=5).rollout(2, [*groups(), quick], long))
        first = next(samples)
        operator.drain("instance-1")
        rest = list(samples)
        assert len({first.key, *(sample.key for sample in rest)}) == 9
        states = {each.instance_id: each.state for each in operator.instances()}
        assert states["instance-1"] is InstanceState.DRAINING
        assert "instance-0" in {sample.provenance.instance_spans[-1].instance_id for sample in rest}
        operator.resume(["instance-1"])
        deadline = time.monotonic() + 60
        while any(each.state is not InstanceState.SERVING for each in operator.instances()):
            assert time.monotonic() < deadline, "instance-1 does not serve again"
            time.sleep(0.05)
        again = list(client.run("resumed", seed=5).rollout(2, groups(), SAMPLING))
        assert "instance-1" in {sample.provenance.instance_spans[0].instance_id for sample in again}
