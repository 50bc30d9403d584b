"""A real gateway and a real coordinator, from the hint to the step that uses it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from paceline.internal.v1 import bubble_pb2
from paceline.v1 import weight_pb2
from services.contracts.seeds import sample_seed
from tests.integration.bubbles.conftest import Coordinator, Poller, progress
from tests.integration.gateway.conftest import CALL, Cluster, check_samples, make_batch, until
from tests.integration.gateway.test_bubbles import hint, make_hint, update

Coordinate = Callable[..., Awaitable[Coordinator]]


@pytest.fixture
async def cluster(redis_url: str, namespace: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(redis_url, namespace)
    yield cluster
    await cluster.close()


async def test_items_are_given_out_in_bubbles_and_serve_the_step_that_they_are_for(
    cluster: Cluster, coordinate: Coordinate, tmp_path: Path
) -> None:
    coordinator = await coordinate()
    # Of what the step is submitted with, nothing is to come too late.
    gateway = await cluster.gateway(coverage_timeout_seconds=CALL)
    fake = await cluster.instance("i0")
    fake.hold_at = 3
    await cluster.serving(gateway, 1)
    coordination = gateway.gateway.leadership.leading().coordinator
    await until(lambda: coordination.connections, "the coordinator is found")
    batch, following = make_batch(ignore_eos=True), make_batch(version=1)
    following.step = 4
    await gateway.trainer.submit(batch)
    assert await hint(gateway, make_hint(following)) == 12

    # In the step: an instance that serves gets nothing, one in a bubble does.
    assert not (await Poller(coordinator, "i0").poll(serving=True)).tasks
    poller = Poller(coordinator, "b")
    items = (await _answered(poller)).tasks
    assert len(items) == 6, "the instance that serves will want its share"
    for item in items:
        assert item.seed == sample_seed(11, 4, item.prompt_id, item.slot)

    # Through the update, until weights are applied.
    fake.hold_at = None
    check_samples(batch, await gateway.trainer.collect(batch))
    more = (await _answered(Poller(coordinator, "i0"))).tasks
    assert not {(i.prompt_id, i.slot) for i in more} & {(i.prompt_id, i.slot) for i in items}
    update_id = await update(gateway, tmp_path, 1)
    fake.apply_gate.clear()
    request = weight_pb2.FinishUpdateRequest(update_id=update_id)
    finishing = gateway.trainer.weights.FinishUpdate(request, timeout=CALL)

    async def halted() -> bool:
        return bool((await poller.poll(progress(items, 5))).halt)

    await until(halted, "the instance is told to stop")
    await poller.poll(progress(items, 9, returned=True), room=0)
    fake.apply_gate.set()
    await finishing

    # The step is submitted: what there is of it is known, and nothing of it is wanted any more.
    again = (await _answered(poller, policy_version=1)).tasks
    await gateway.trainer.submit(following)
    check_samples(following, await gateway.trainer.collect(following))

    async def revoked() -> bool:
        return len((await poller.poll(progress(again, 10))).revoked) == len(again)

    await until(revoked, "the items of the step are revoked")
    assert gateway.metric("pregenerated_tokens_total") == 9 * len(items)
    assert gateway.metric("announced_step_tokens_total") > 0


async def _answered(poller: Poller, policy_version: int = 0) -> bubble_pb2.PollWorkResponse:
    """Poll until there are items."""
    found: list[bubble_pb2.PollWorkResponse] = []

    async def some() -> bool:
        answer = await poller.poll(policy_version=policy_version)
        found.append(answer)
        return bool(answer.tasks)

    await until(some, f"{poller.name} is given items")
    return found[-1]
