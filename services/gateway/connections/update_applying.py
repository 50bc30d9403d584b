"""Application of staged weights on the instances."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.v1 import weight_pb2 as pb
from services.gateway.connections.connection import Connection, InstanceResult, on_all
from services.gateway.connections.roster import Roster
from services.gateway.connections.update_staging import UpdateStaging
from services.gateway.fleet.update_book import InFlightTreatment, WeightUpdate


@dataclass(frozen=True, slots=True)
class FinishedUpdate:
    """Published update: its outcome on each instance, and what became of samples that were unfinished."""

    instances: list[pb.InstanceUpdate] = field(default_factory=list)
    aborted: int = 0
    continued: int = 0


async def apply_on_all(
    connections: Sequence[Connection], update: WeightUpdate, roster: Roster, staging: UpdateStaging
) -> list[InstanceResult]:
    """Have instances replace their weights by those that they have staged; one that fails is quarantined."""
    begin = time.perf_counter()
    goes_on = update.in_flight is InFlightTreatment.CONTINUE
    results = await on_all(connections, lambda each: each.apply(update.version, goes_on=goes_on), roster.pace)
    staging.metrics.update_seconds.labels("apply").observe(time.perf_counter() - begin)
    for result in results:
        connection = result.connection
        connection.staged_version = 0
        if result.error is not None:
            roster.quarantine(connection, f"did not apply {update.version}: {result.error.message}")
        else:
            staging.describe(result)
    return results
