"""Samples that are asked for one by one, and submitted as batches."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline import types as t
from paceline.calls import GatewayCalls
from paceline.errors import InvalidArgumentError, NotFoundError
from paceline.integrations.prompts import prompt_id_of
from paceline.rollout import AsyncRollout


@dataclass(slots=True, eq=False)
class VerlCall:
    """A sample that somebody waits for."""

    prompt_id: str
    prompt_token_ids: Sequence[int]
    sampling: t.SamplingParams
    answer: asyncio.Future[t.Sample | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """None: it was not begun, because samples that come during a pause are sent away."""

    def settle(self, sample: t.Sample | None) -> None:
        """Answer, unless nobody waits any more."""
        if not self.answer.done():
            self.answer.set_result(sample)

    def fail(self, error: Exception) -> None:
        """Answer with an error, unless nobody waits any more."""
        if not self.answer.done():
            self.answer.set_exception(error)


class SampleQueue:
    """The samples of one server, for one event loop.

    Those that come while a batch is submitted go with the next one, so that thousands of calls at once are a few
    batches, and equal prompts among them a group. Each batch has a seed of its own: the same prompt in two batches
    of a step has different samples.
    """

    def __init__(self, client: GatewayCalls, run_id: str, seed: str) -> None:
        """`seed` must be another for each server of a run."""
        self.step = 0
        """Step of the batches to come."""
        self._client = client
        self._run_id = run_id
        self._seed = seed
        # A server that starts again must not meet the batches that it had.
        self._launch = uuid.uuid4().hex
        self._batches = 0
        self._waiting: list[VerlCall] = []
        self._open = True
        self._sends_away = False
        self._submitting: asyncio.Task[None] | None = None
        self._reading: dict[AsyncRollout, asyncio.Task[None]] = {}

    async def sample(self, prompt_token_ids: Sequence[int], sampling: t.SamplingParams) -> t.Sample | None:
        """Generate one sample. It waits for the end of a pause; None: it was sent away instead.

        Raises:
            PacelineError: it was refused, or its gateway is lost.
        """
        call = VerlCall(prompt_id_of(prompt_token_ids), prompt_token_ids, sampling)
        if self._sends_away:
            return None
        self._waiting.append(call)
        self._submit()
        return await call.answer

    async def pause(self, *, sends_away: bool = False) -> int:
        """End all samples where they are, with their tokens; return how many, once they have ended.

        Those that come from now on wait, or with `sends_away` are answered None.
        """
        self._open, self._sends_away = False, sends_away
        if self._submitting is not None:
            # A batch on its way has samples as soon as it is accepted.
            await self._submitting
        if sends_away:
            waiting, self._waiting = self._waiting, []
            for call in waiting:
                call.settle(None)
        reading = dict(self._reading)
        ended = await asyncio.gather(*(_cancel(rollout) for rollout in reading))
        await asyncio.gather(*reading.values())
        return sum(ended)

    def resume(self) -> None:
        """End a pause."""
        self._open, self._sends_away = True, False
        self._submit()

    def _submit(self) -> None:
        if self._open and self._submitting is None and self._waiting:
            self._submitting = asyncio.create_task(self._submit_waiting())

    async def _submit_waiting(self) -> None:
        try:
            while self._open and self._waiting:
                calls, self._waiting = self._waiting, []
                await self._submit_calls(calls)
        finally:
            self._submitting = None

    async def _submit_calls(self, calls: list[VerlCall]) -> None:
        """Submit calls as one batch. Where a call is refused, only that one fails."""
        groups = self._grouped(calls)
        try:
            batch = self._batch(groups, await self._client.shards.version())
            rollout = AsyncRollout(self._client, batch)
            await rollout.begin()
        except InvalidArgumentError as error:
            if len(groups) == 1:
                _fail(calls, error)
                return
            members = [call for group in groups.values() for call in group]
            middle = len(members) // 2
            await self._submit_calls(members[:middle])
            await self._submit_calls(members[middle:])
        except Exception as error:
            _fail([call for group in groups.values() for call in group], error)
        else:
            self._reading[rollout] = asyncio.create_task(self._read(rollout, groups))

    def _grouped(self, calls: list[VerlCall]) -> dict[str, list[VerlCall]]:
        """Group calls by prompt. Those whose prompt is there with other sampling parameters wait once more."""
        groups: dict[str, list[VerlCall]] = {}
        for call in calls:
            group = groups.setdefault(call.prompt_id, [])
            if group and group[0].sampling != call.sampling:
                self._waiting.append(call)
            else:
                group.append(call)
        return groups

    def _batch(self, groups: dict[str, list[VerlCall]], policy_version: int) -> t.Batch:
        self._batches += 1
        seed = hashlib.blake2b(f"{self._seed}.{self._batches}".encode(), digest_size=8)
        return t.Batch(
            run_id=self._run_id,
            batch_id=f"{self._launch}.{self._batches}",
            step=self.step,
            policy_version=policy_version,
            groups=[
                t.Group(prompt_id, calls[0].prompt_token_ids, len(calls), calls[0].sampling)
                for prompt_id, calls in groups.items()
            ],
            run_seed=int.from_bytes(seed.digest(), "little"),
        )

    async def _read(self, rollout: AsyncRollout, groups: dict[str, list[VerlCall]]) -> None:
        try:
            async for sample in rollout:
                groups[sample.prompt_id][sample.slot].settle(sample)
            rollout.post_ack()
        except Exception as error:
            _fail([call for group in groups.values() for call in group], error)
        finally:
            del self._reading[rollout]


async def _cancel(rollout: AsyncRollout) -> int:
    try:
        return await rollout.cancel(keep_partial=True)
    except NotFoundError:
        # It has ended meanwhile, and was acknowledged.
        return 0


def _fail(calls: list[VerlCall], error: Exception) -> None:
    for call in calls:
        call.fail(error)
