"""A client of several gateways: it follows the one that leads, and misses nothing that a gateway forgets."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2

import paceline
from paceline import Batch, Client, Group, RetryPolicy
from tests.integration.sdk.gateway_double import GatewayDouble, State

QUICK = RetryPolicy(seconds=60, initial=0.01, maximum=0.2)
BATCH = Batch("run", "batch", 0, 4, [Group("a", [1, 2], 3), Group("b", [1, 2, 3], 3)])
ALL = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("b", 2)]


@pytest.fixture
def standby(gateway: GatewayDouble) -> Iterator[GatewayDouble]:
    """Another gateway on the same store, which does not lead."""
    with GatewayDouble(state=State(batches=gateway.state.batches), leads=False) as double:
        yield double


@pytest.fixture
def client(gateway: GatewayDouble, standby: GatewayDouble) -> Iterator[Client]:
    addresses = f"{gateway.address}, {standby.address}"
    with Client(addresses, timeout=60, retry=QUICK) as client:
        yield client


def keys(events: list[paceline.SampleEvent]) -> list[tuple[str, int]]:
    return [(event.sample.prompt_id, event.sample.slot) for event in events]


def test_a_stream_goes_on_at_the_gateway_that_leads_when_the_first_dies(
    gateway: GatewayDouble, standby: GatewayDouble, client: Client
) -> None:
    client.submit(BATCH)
    gateway.state.stall_after = 3
    events = client.stream("run", "batch")
    seen = [next(events), next(events)]
    gateway.stop()
    standby.lead(True)
    seen += events
    assert keys(seen) == ALL
    assert standby.names() == ["StreamRollouts"]
    gateway.start()


def test_calls_go_to_the_gateway_that_leads_while_the_other_is_alive(
    gateway: GatewayDouble, standby: GatewayDouble, client: Client
) -> None:
    assert client.versions().policy_version == 4
    standby.lead(True)
    gateway.lead(False)
    unavailable = (grpc.StatusCode.UNAVAILABLE, "another gateway leads", [])
    gateway.state.failures["GetVersions"] = [unavailable] * 1000
    for _ in range(5):
        assert client.versions().policy_version == 4
    assert standby.names() == ["GetVersions"] * 5


def test_a_gateway_that_does_not_lead_is_asked_only_by_who_says_so(standby: GatewayDouble) -> None:
    with (
        Client(standby.address, retry=RetryPolicy(seconds=0.5)) as strict,
        pytest.raises(paceline.UnavailableError),
    ):
        strict.knobs()
    with Client(standby.address, leaders_only=False) as client:
        assert client.knobs().revision == 3


def test_threads_go_on_with_their_streams_when_another_dials_anew(
    gateway: GatewayDouble, client: Client
) -> None:
    client.submit(BATCH)
    gateway.state.stall_after = 3
    events = client.stream("run", "batch")
    seen = [next(events), next(events)]
    gateway.state.failures["GetVersions"] = [(grpc.StatusCode.UNAVAILABLE, "no store", [])]
    asking = threading.Thread(target=client.versions)
    asking.start()
    asking.join(60)
    gateway.go_on()
    assert keys(seen + list(events)) == ALL
    assert gateway.names().count("StreamRollouts") == 1


def test_a_full_gateway_is_asked_again_when_it_says_when(
    gateway: GatewayDouble, client: Client, delays: list[float]
) -> None:
    info = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=20))
    full = (grpc.StatusCode.RESOURCE_EXHAUSTED, "65536 samples are queued", [info])
    gateway.state.failures["SubmitRollouts"] = [full, full]
    assert not client.submit(BATCH).already_submitted
    assert delays == [20, 20]
    assert gateway.names().count("SubmitRollouts") == 3


def test_a_stream_that_the_gateway_has_forgotten_does_not_hang(gateway: GatewayDouble) -> None:
    with Client(gateway.address, stream_seconds=2.0) as client:
        client.submit(BATCH)
        gateway.state.stall_after = 3
        events = client.stream("run", "batch")
        seen = [next(events), next(events)]
        gateway.state.stall_after = None
        assert keys(seen + list(events)) == ALL
    assert gateway.names().count("StreamRollouts") >= 2


def test_a_stream_on_which_the_gateway_sends_nothing_is_an_error_in_the_end(gateway: GatewayDouble) -> None:
    gateway.state.hanging.add("StreamRollouts")
    retry = RetryPolicy(seconds=1, initial=0.01)
    with Client(gateway.address, stream_seconds=0.2, retry=retry) as client:
        client.submit(BATCH)
        with pytest.raises(paceline.UnavailableError) as caught:
            list(client.stream("run", "batch"))
        assert caught.value.reason == "STREAM_SILENT"
        assert client.versions().policy_version == 4


def test_a_batch_that_the_gateway_has_lost_is_submitted_again_and_no_sample_comes_twice(
    gateway: GatewayDouble, client: Client
) -> None:
    client.submit(BATCH)
    gateway.state.stall_after = 3
    events = client.stream("run", "batch")
    seen = [next(events), next(events)]
    gateway.stop()
    gateway.state.batches.clear()
    gateway.state.stall_after = None
    gateway.start()
    assert keys(seen + list(events)) == ALL
    assert gateway.names().count("SubmitRollouts") == 2


def test_a_cursor_that_the_gateway_does_not_know_is_taken_back(
    gateway: GatewayDouble, client: Client
) -> None:
    client.submit(BATCH)
    violation = error_details_pb2.BadRequest.FieldViolation(field="cursor", description="is above the last")
    unknown = error_details_pb2.BadRequest(field_violations=[violation])
    gateway.state.cut_after = 3
    gateway.state.failures["StreamRollouts"] = [None, (grpc.StatusCode.INVALID_ARGUMENT, "no", [unknown])]
    assert keys(list(client.stream("run", "batch"))) == ALL
    assert gateway.names().count("StreamRollouts") == 3


def test_samples_that_are_lost_again_and_again_are_data_loss(gateway: GatewayDouble, client: Client) -> None:
    client.submit(BATCH)
    gateway.state.failures["StreamRollouts"] = [(grpc.StatusCode.DATA_LOSS, "a hole in the journal", [])] * 9
    with pytest.raises(paceline.DataLossError, match="hole in the journal"):
        list(client.stream("run", "batch"))
    assert gateway.names().count("SubmitRollouts") == 4


def test_a_lost_batch_that_this_client_has_not_is_data_loss(gateway: GatewayDouble, client: Client) -> None:
    with pytest.raises(paceline.DataLossError) as caught:
        list(client.stream("run", "gone", cursor=7))
    assert caught.value.reason == "BATCH_LOST"
    assert caught.value.metadata == {"run_id": "run", "batch_id": "gone", "cursor": "7"}
    with pytest.raises(paceline.NotFoundError):
        list(client.stream("run", "never"))
