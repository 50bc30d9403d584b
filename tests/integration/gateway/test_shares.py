"""Several runs on the same instances: priorities, shares by weight, and what is left to do."""

from __future__ import annotations

from paceline.internal.v1 import demand_pb2, demand_pb2_grpc
from paceline.v1 import rollout_pb2, sample_pb2
from tests.integration.gateway.conftest import CALL, Cluster, RunningGateway, check_samples, make_batch, until
from tests.support.fake_instance import FakeInstance


async def one_at_a_time(cluster: Cluster) -> tuple[RunningGateway, FakeInstance]:
    """Return a gateway, and its only instance, which runs one sample at a time and holds its first."""
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0", max_running=1)
    fake.hold_at = 4
    await cluster.serving(gateway, 1)
    return gateway, fake


async def order_of(gateway: RunningGateway, *requests: rollout_pb2.SubmitRolloutsRequest) -> list[str]:
    """Return the batches by the times at which their samples began, the first left out."""
    begun: list[tuple[float, str]] = []
    for request in requests:
        events = await gateway.trainer.collect(request)
        check_samples(request, events)
        assert {event.sample.status for event in events} <= {
            sample_pb2.SAMPLE_STATUS_COMPLETED,
            sample_pb2.SAMPLE_STATUS_TRUNCATED,
        }
        begun += [
            (event.sample.provenance.instance_spans[0].begin.ToNanoseconds(), request.batch_id)
            for event in events
        ]
    return [batch_id for _, batch_id in sorted(begun)][1:]


async def test_a_batch_of_higher_priority_is_placed_before_all_that_waits(cluster: Cluster) -> None:
    gateway, fake = await one_at_a_time(cluster)
    usual, urgent = make_batch(groups=2, samples=3), make_batch(groups=1, samples=3, priority=1)
    await gateway.trainer.submit(usual)
    await until(lambda: len(fake.running()) == 1, "the first sample runs")
    await gateway.trainer.submit(urgent)
    fake.hold_at = None
    order = await order_of(gateway, usual, urgent)
    assert order == [urgent.batch_id] * 3 + [usual.batch_id] * 5


async def test_two_runs_share_an_instance_by_weight_and_then_one_has_it_alone(cluster: Cluster) -> None:
    gateway, fake = await one_at_a_time(cluster)
    first = make_batch(groups=1, samples=1)
    big, small = (make_batch(groups=1, samples=8, weight=weight) for weight in (2, 0))
    for number, request in enumerate((big, small)):
        request.run_id = f"run{number}"
        request.groups[0].expected_tokens = 20
    await gateway.trainer.submit(first)
    await until(lambda: len(fake.running()) == 1, "the first sample runs")
    await gateway.trainer.submit(big)
    await gateway.trainer.submit(small)
    stub = demand_pb2_grpc.DemandServiceStub(gateway.trainer.channel)
    demand = await stub.GetDemand(demand_pb2.GetDemandRequest(), timeout=CALL)
    assert (demand.waiting_samples, demand.waiting_tokens) == (16, 16 * 20)
    assert demand.running_samples == 1
    fake.hold_at = None
    order = await order_of(gateway, first, big, small)
    # The lengths become known as samples end, so the share in samples is a little off.
    assert 5 <= order[:9].count(big.batch_id) <= 7
    assert sorted(order) == sorted([big.batch_id, small.batch_id] * 8)
