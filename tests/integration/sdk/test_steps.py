"""Steps of a run: batches in parts that are read as one, and acknowledgement of what is not needed again."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2

import paceline
from paceline import AsyncClient, Client, Group, RetryPolicy, Reward, SamplingParams
from paceline.batches.parts import parts_of
from tests.integration.sdk.gateway_double import GatewayDouble, until

QUICK = RetryPolicy(seconds=60, initial=0.01, maximum=0.2)
GROUPS = [Group(name, [1] * length, 3) for length, name in enumerate("abcde", 1)]
ALL = {(name, slot): [length, slot, 7] for length, name in enumerate("abcde", 1) for slot in range(3)}
PARTS = [f"step-000000.v4.0.part{number}of3" for number in (1, 2, 3)]


@pytest.fixture
def client(gateway: GatewayDouble) -> Iterator[Client]:
    with Client(gateway.address, timeout=60, retry=QUICK) as client:
        yield client


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is acknowledged in the background arrives before a client is closed, however slow the gateway is."""
    monkeypatch.setattr("paceline.transport.grpc.FAREWELL_SECONDS", 60.0)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of more than six samples are split."""
    monkeypatch.setattr("paceline.batches.rollout.parts_of", partial(parts_of, most_samples=6))


def tokens(samples: list[paceline.Sample]) -> dict[tuple[str, int], list[int]]:
    found = {(sample.prompt_id, sample.slot): sample.token_ids.tolist() for sample in samples}
    assert len(found) == len(samples)
    return found


@pytest.mark.usefixtures("small_parts")
def test_a_large_batch_is_submitted_in_parts_and_read_as_one(gateway: GatewayDouble, client: Client) -> None:
    run = client.run("run", seed=7)
    rollout = run.rollout(0, GROUPS)
    assert [batch_id for _, batch_id in gateway.state.batches] == PARTS
    assert len(rollout) == 15
    some = next(iter(rollout))
    assert tokens([some, *rollout]) == ALL
    assert rollout.complete
    assert rollout.submitted == paceline.Submitted("step-000000.v4.0", 15, False)
    rewards = [Reward(name, slot, 1.0) for name, slot in ALL]
    assert run.report_rewards(rollout.batch.batch_id, rewards, kl=0.5) == 15
    assert [(each.batch_id, len(each.rewards), each.HasField("kl")) for each in gateway.state.reports] == [
        (PARTS[0], 6, True),
        (PARTS[1], 6, False),
        (PARTS[2], 3, False),
    ]
    assert rollout.cancel() == 3 * 99
    assert rollout.ack() == 15
    assert client.run("run", seed=7).rollout(0, GROUPS).submitted.already_submitted


@pytest.mark.usefixtures("small_parts")
def test_parts_for_which_there_is_no_room_follow_while_the_others_are_read(
    gateway: GatewayDouble, client: Client
) -> None:
    info = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(nanos=1000))
    full = (grpc.StatusCode.RESOURCE_EXHAUSTED, "6 samples are queued", [info])
    gateway.state.failures["SubmitRollouts"] = [None, full, full, None, full]
    rollout = client.run("run").rollout(0, GROUPS)
    assert [batch_id for _, batch_id in gateway.state.batches] == PARTS[:1]
    assert tokens(list(rollout)) == ALL


@pytest.mark.usefixtures("small_parts")
async def test_an_async_run_reads_parts_and_acknowledges_them(gateway: GatewayDouble) -> None:
    async with AsyncClient(gateway.address, retry=QUICK) as client, client.run("run") as run:
        assert tokens([sample async for sample in await run.rollout(0, GROUPS)]) == ALL
        assert gateway.state.acks == []
    assert sorted((each.batch_id, each.cursor) for each in gateway.state.acks) == list(
        zip(PARTS, (6, 6, 3), strict=True)
    )


def read_steps(client: Client, *steps: int, run: Any = None) -> None:
    run = run or client.run("run")
    for step in steps:
        list(run.rollout(step, [Group("a", [1], 3)]))


def test_a_step_is_acknowledged_when_the_next_is_submitted(gateway: GatewayDouble) -> None:
    with Client(gateway.address, retry=QUICK) as client:
        run = client.run("run")
        read_steps(client, 0, 0, run=run)
        assert "AckRollouts" not in gateway.names(), "a trainer that dies now reads them again"
        read_steps(client, 1, run=run)
    assert sorted((each.batch_id, each.cursor) for each in gateway.state.acks) == [
        ("step-000000.v4.0", 3),
        ("step-000000.v4.1", 3),
    ]


def test_what_was_not_read_to_its_end_is_not_acknowledged_nor_what_an_exception_ended(
    gateway: GatewayDouble,
) -> None:
    with Client(gateway.address, retry=QUICK) as client:
        run = client.run("run")
        left = run.rollout(0, [Group("a", [1], 3)])
        next(iter(left))
        read_steps(client, 1, run=run)
        other = client.run("other")
        read_steps(client, 0, run=other)
        other.__exit__(KeyError)
    assert gateway.state.acks == []


def test_a_run_that_ends_well_acknowledges_its_last_step(gateway: GatewayDouble) -> None:
    with Client(gateway.address, retry=QUICK) as client, client.run("run") as run:
        read_steps(client, 8, run=run)
    assert [each.batch_id for each in gateway.state.acks] == ["step-000008.v4.0"]


# What is not there is not asked for again; how many were under way by then is nobody's promise.
@pytest.mark.parametrize(("code", "least", "most"), [("UNIMPLEMENTED", 1, 4), ("INTERNAL", 5, 5)])
def test_acknowledgement_that_fails_does_no_harm(
    gateway: GatewayDouble, code: str, least: int, most: int
) -> None:
    gateway.state.failures["AckRollouts"] = [(grpc.StatusCode[code], "not here", [])] * 9
    with Client(gateway.address, retry=QUICK) as client:
        run = client.run("run")
        for step in range(6):
            read_steps(client, step, run=run)
            # The call is made in the background.
            until(lambda step=step: gateway.names().count("AckRollouts") >= min(step, least))
    assert least <= gateway.names().count("AckRollouts") <= most


@pytest.mark.usefixtures("small_parts")
def test_groups_are_given_whole_and_what_is_left_in_the_middle_is_given_by_the_next_iteration(
    gateway: GatewayDouble, client: Client
) -> None:
    with client.run("run", seed=1) as run:
        rollout = run.rollout(0, GROUPS)
        first = next(iter(rollout.by_group()))
        groups = [first, *rollout.by_group()]
        assert rollout.complete
        for again in (rollout, rollout.by_group()):
            with pytest.raises(ValueError, match="were given before"):
                list(again)
    assert sorted(group[0].prompt_id for group in groups) == list("abcde")
    assert all([sample.slot for sample in group] == [0, 1, 2] for group in groups)
    assert tokens([sample for group in groups for sample in group]) == ALL


@pytest.mark.usefixtures("small_parts")
def test_what_can_be_read_once_is_in_every_part_and_in_a_second_submission(
    gateway: GatewayDouble, client: Client
) -> None:
    once = SamplingParams(stop_token_ids=(each for each in (5, 6)), stop=iter(["x"]))  # type: ignore[arg-type]
    rollout = client.run("run", seed=1).rollout(0, (group for group in GROUPS), once)
    sent = [each.sampling for each in gateway.state.batches.values()]
    assert len(sent) == len(PARTS)
    gateway.state.batches.clear()
    assert len(list(rollout)) == len(ALL)
    for sampling in (*sent, *(each.sampling for each in gateway.state.batches.values())):
        assert (list(sampling.stop_token_ids), list(sampling.stop)) == ([5, 6], ["x"])
