"""Staging of one update's weights on the instances, in tasks that outlive the call that waits for them."""

import asyncio
from collections.abc import Mapping
from types import MappingProxyType

import grpc

from services.contracts.errors import Aborted, ServiceError, Unavailable
from services.gateway.connections.connection import Connection, InstanceResult, WeightSource, attempt, failed
from services.gateway.dispatch.turns import Pace


class InstanceStaging:
    """One task for each instance, which receives or reads weights and checks them.

    The tasks belong to the update, not to who waits for them: a wait that is cancelled leaves them alone, and
    another one may begin.
    """

    def __init__(
        self,
        version: int,
        sources: Mapping[Connection, WeightSource],
        pace: Pace,
        refusals: frozenset[grpc.StatusCode] = frozenset({grpc.StatusCode.INVALID_ARGUMENT}),
    ) -> None:
        """Have instances stage a version. An error with a code of `refusals` is a verdict for all instances."""
        self._refusals = refusals
        self._tasks = {
            connection: asyncio.create_task(
                _attempt(connection, version, source, pace), name=f"stage-{connection.instance_id}"
            )
            for connection, source in sources.items()
        }

    @property
    def running(self) -> bool:
        """True while an instance stages."""
        return any(not task.done() for task in self._tasks.values())

    @property
    def refusal(self) -> ServiceError | None:
        """The error by which an instance refused the weights for all; None while there is none."""
        errors = (self._error(each) for each in self._tasks)
        return next((error for error in errors if error and error.code in self._refusals), None)

    def taking_part(self) -> list[Connection]:
        """Return the instances that live and have not failed, at least one.

        ServiceError: there is none, for the reason of the one that failed last; or the weights were refused.
        """
        if refusal := self.refusal:
            raise refusal
        living = [each for each in self._tasks if not each.gone.is_set() and not self._error(each)]
        if living:
            return living
        for connection in reversed(self._tasks):
            if error := self._error(connection):
                raise error
        raise Unavailable("every instance that the weights were pushed to is gone", retry_after=2.0)

    async def results(self, left_out: Mapping[str, str] = MappingProxyType({})) -> list[InstanceResult]:
        """Return what came of it on each instance, once all are done but those `left_out`, for a reason each.

        A refusal ends the wait: nothing that another instance could say would change it. Aborted: `end` was called.
        """
        pending = {
            task
            for connection, task in self._tasks.items()
            if not task.done() and connection.instance_id not in left_out
        }
        while pending and not self.refusal:
            # Not `gather`, which would cancel the tasks together with the call that waits.
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if any(task.cancelled() for task in self._tasks.values()):
            text = "these weights are staged no more: the update was aborted, or its staging was begun anew"
            raise Aborted("STAGING_ENDED", text)
        return [
            task.result() if task.done() else failed(connection, _unheard(connection, left_out))
            for connection, task in self._tasks.items()
        ]

    def end(self) -> None:
        """Let no instance go on; who waits for results is told."""
        for task in self._tasks.values():
            task.cancel()

    def _error(self, connection: Connection) -> ServiceError | None:
        task = self._tasks[connection]
        return task.result().error if task.done() and not task.cancelled() else None


async def _attempt(connection: Connection, version: int, source: WeightSource, pace: Pace) -> InstanceResult:
    return await attempt(connection, lambda each: each.stage(version, source), pace)


def _unheard(connection: Connection, left_out: Mapping[str, str]) -> ServiceError:
    if reason := left_out.get(connection.instance_id):
        return Unavailable(f"left out of the broadcast: {reason}")
    return Unavailable("another instance refused the weights before this one had them")
