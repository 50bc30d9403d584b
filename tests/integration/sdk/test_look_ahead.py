"""Batches in order: each is announced while the one before it is generated."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Sequence

import grpc
import pytest

from paceline import AsyncClient, Client, Exactness, ExactnessLevel, Group, RetryPolicy, SamplingParams
from tests.integration.sdk.gateway_double import GatewayDouble

QUICK = RetryPolicy(seconds=60, initial=0.01, maximum=0.2)
BATCHES = [[Group(f"p{step}", [1, step], 2)] for step in range(3)]
SAMPLING = SamplingParams(max_tokens=5, temperature=0.5)
COUPLED = Exactness(ExactnessLevel.COUPLED_HISTORY)
_RPCS = ("SubmitRollouts", "HintNextBatch", "StreamRollouts")


def calls(gateway: GatewayDouble) -> list[str]:
    return [name for name, _ in gateway.state.calls if name in _RPCS]


def announced(gateway: GatewayDouble) -> list[tuple[int, str, int]]:
    return [(each.step, each.groups[0].prompt_id, each.policy_version) for each in gateway.state.hints]


@pytest.mark.parametrize("first_step", [0, 7])
def test_each_batch_is_announced_before_its_predecessor_is_read(
    gateway: GatewayDouble, first_step: int
) -> None:
    with Client(gateway.address, retry=QUICK) as client, client.run("run", seed=3) as run:
        seen = []
        batches = iter(BATCHES)
        for rollout in run.rollouts(batches, SAMPLING, exactness=COUPLED, first_step=first_step, priority=2):
            seen.append([sample.prompt_id for sample in rollout])
    assert seen == [["p0", "p0"], ["p1", "p1"], ["p2", "p2"]]
    assert calls(gateway) == [
        "SubmitRollouts",
        "HintNextBatch",
        "StreamRollouts",
        "SubmitRollouts",
        "HintNextBatch",
        "StreamRollouts",
        "SubmitRollouts",
        "StreamRollouts",
    ]
    assert announced(gateway) == [(first_step + 1, "p1", 5), (first_step + 2, "p2", 5)]
    # A hint is of use only where it names the very samples that are submitted then.
    for hint, batch in zip(gateway.state.hints, list(gateway.state.batches.values())[1:], strict=True):
        assert (hint.step, list(hint.groups), hint.sampling, hint.exactness, hint.run_seed) == (
            batch.step,
            list(batch.groups),
            batch.sampling,
            batch.exactness,
            batch.run_seed,
        )
    assert [batch.priority for batch in gateway.state.batches.values()] == [2, 2, 2]


def test_the_next_batch_is_asked_for_when_its_predecessor_is_submitted(gateway: GatewayDouble) -> None:
    submitted = []

    def slow() -> Iterator[Sequence[Group]]:
        for batch in BATCHES:
            submitted.append(len(gateway.state.batches))
            yield batch

    with Client(gateway.address, retry=QUICK) as client, client.run("run") as run:
        for rollout in run.rollouts(slow()):
            list(rollout)
    assert submitted == [0, 1, 2]


def test_what_can_be_read_once_is_announced_and_submitted(gateway: GatewayDouble) -> None:
    batches = ((Group(f"p{step}", (each for each in (1, step)), 2) for _ in "1") for step in range(3))
    with Client(gateway.address, retry=QUICK) as client, client.run("run") as run:
        assert [len(list(rollout)) for rollout in run.rollouts(batches)] == [2, 2, 2]
    assert [list(each.groups[0].prompt_token_ids) for each in gateway.state.hints] == [[1, 1], [1, 2]]


def test_a_step_that_cannot_be_announced_is_generated_all_the_same(
    gateway: GatewayDouble, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.state.failures["HintNextBatch"] = [(grpc.StatusCode.FAILED_PRECONDITION, "no room", [])]
    with (
        caplog.at_level(logging.WARNING, "paceline"),
        Client(gateway.address, retry=QUICK) as client,
        client.run("run") as run,
    ):
        assert [len(list(rollout)) for rollout in run.rollouts(BATCHES)] == [2, 2, 2]
    assert [each.step for each in gateway.state.hints] == [2]
    assert "step 1 of run run was not announced" in caplog.text


def test_no_batches_are_no_steps(gateway: GatewayDouble) -> None:
    with Client(gateway.address, retry=QUICK) as client, client.run("run") as run:
        assert list(run.rollouts([])) == []
    assert calls(gateway) == []


async def test_the_asynchronous_client_takes_asynchronous_batches(gateway: GatewayDouble) -> None:
    async def loaded() -> AsyncIterator[Sequence[Group]]:
        for batch in BATCHES:
            yield batch

    async with AsyncClient(gateway.address, retry=QUICK) as client, client.run("run") as run:
        for batches in (loaded(), BATCHES):
            seen = [[s.prompt_id async for s in rollout] async for rollout in run.rollouts(batches)]
            assert seen == [["p0", "p0"], ["p1", "p1"], ["p2", "p2"]]
    assert [step for step, *_ in announced(gateway)] == [1, 2, 1, 2]
